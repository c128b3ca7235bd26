// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)
#define MUSTER_CODEC avx512
#include "core/collective/quantized/block_codec_body.inc"
#endif
