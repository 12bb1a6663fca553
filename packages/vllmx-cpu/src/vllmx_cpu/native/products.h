// The products of one phase, of a matrix or of several of one shape that lie one behind the other.
#pragma once
#include "product.h"

namespace vx {
namespace VX_ISA {

// Rows first ... first + rows - 1 are for matrix `matrix`.
struct Part {
  int32_t matrix, first, rows;
  // Found by `run_products`: where their panels lie, and whether the part before has packed them.
  size_t panels;
  bool packed;
};

struct Products {
  Product all;   // of matrix 0 and all rows
  void* panels;  // room for the packed activations, 64-byte aligned
  Part* parts;  // each thread's own
  int32_t count;
};

// All threads of the team call it. Ends without a barrier.
void run_products(const Products& products, VxCtx* ctx);

}  // namespace VX_ISA
}  // namespace vx
