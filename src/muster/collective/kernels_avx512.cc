#if defined(__x86_64__)
#define MUSTER_KERNELS avx512
#include "muster/collective/kernels_body.inc"
#endif
