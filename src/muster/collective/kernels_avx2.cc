#if defined(__x86_64__)
#define MUSTER_KERNELS avx2
#include "muster/collective/kernels_body.inc"
#endif
