# find_package(mori_ops) gives mori::mori_ops. Python3_EXECUTABLE says whose torch to link with.
include(CMakeFindDependencyMacro)
list(APPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")
find_dependency(TorchStable 2.11)
include("${CMAKE_CURRENT_LIST_DIR}/mori_ops-targets.cmake")
