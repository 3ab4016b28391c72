#pragma once
#include "../msl/matmul2d.h"
