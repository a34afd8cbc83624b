// nvcc compiles functions with this mark for the device, too, so that both sides share one definition.
#pragma once

#ifdef __CUDACC__
#define HVD_SPARSE_HD __host__ __device__
#else
#define HVD_SPARSE_HD
#endif
