// SPDX-License-Identifier: BSD-3-Clause
#define MUSTER_CODEC baseline
#include "core/collective/quantized/block_codec_body.inc"
