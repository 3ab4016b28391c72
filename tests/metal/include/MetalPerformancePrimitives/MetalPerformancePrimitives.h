#pragma once
#if __METAL_VERSION__ < 400
#error "this header needs Metal 4"
#endif
#include "../msl/matmul2d.h"
