// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)
#define MUSTER_KERNELS avx512
#include "core/collective/kernels/kernels_body.inc"
#endif
