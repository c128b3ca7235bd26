#define MUSTER_KERNELS baseline
#include "muster/collective/kernels_body.inc"
