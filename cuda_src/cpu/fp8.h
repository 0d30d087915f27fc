// The host kernels of FP8 per-tensor scaling: amax, scale, cast.
#pragma once

#include "cpu/fp8_amax.h"
#include "cpu/fp8_cast.h"
