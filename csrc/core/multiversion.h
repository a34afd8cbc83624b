// The compiler builds functions with this mark for several x86-64 levels. The loader chooses one when the library is
// loaded. Only in anonymous namespaces: GCC exports the choices of others from the library.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(HVD_SPARSE_PORTABLE)
#if __GNUC__ >= 12
#define HVD_SPARSE_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else  // GCC 12 is the first that chooses by these levels
#define HVD_SPARSE_MULTIVERSION __attribute__((target_clones("avx2", "default")))
#endif
#else
#define HVD_SPARSE_MULTIVERSION
#endif
