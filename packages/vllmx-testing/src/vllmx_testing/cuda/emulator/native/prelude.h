// What every emulated kernel includes and none changes, for build.py to have parsed once: most of the
// time of compiling a kernel. It must not depend on what a kernel is compiled with.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
