// Handles of packed matrices. A handle is a number that is never used twice in a process, so that a stale or foreign
// handle is never taken for another matrix. A kernel shares the matrix: it lives until its handle is released and the last
// session that multiplies with it is closed.
#pragma once

#include <cstdint>
#include <memory>

#include "matrix.h"

namespace tformer {

int64_t keep_matrix(std::shared_ptr<const Matrix> matrix);
std::shared_ptr<const Matrix> find_matrix(int64_t handle);  // null for an unknown handle
bool release_matrix(int64_t handle);

}  // namespace tformer
