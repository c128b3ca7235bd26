#define MUSTER_KERNELS baseline
#include "core/collective/kernels/kernels_body.inc"
