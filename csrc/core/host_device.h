// What is marked so is compiled for the host and, by nvcc, for the device too: one definition, one result.
#pragma once

#ifdef __CUDACC__
#define HVD_SPARSE_HD __host__ __device__
#else
#define HVD_SPARSE_HD
#endif
