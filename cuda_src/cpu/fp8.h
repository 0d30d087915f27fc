// The host kernels of FP8: amax, scale and cast per tensor, and blocks of 128.
#pragma once

#include "cpu/fp8_amax.h"
#include "cpu/fp8_block.h"
#include "cpu/fp8_cast.h"
