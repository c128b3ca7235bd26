// SPDX-License-Identifier: BSD-3-Clause
#define MUSTER_KERNELS baseline
#include "core/collective/kernels/kernels_body.inc"
