// The registry behind mori_ops.route() and mori_ops.build_info().
#include "route.h"

#include "check.h"

namespace mori {
namespace {

struct Table {
  std::string op, device;
  const Route* rows;
  size_t count;
};

std::vector<Table>& tables() {
  static std::vector<Table> all;  // filled by static initialisers of the backend files
  return all;
}

// "kernel\twhy"
std::string route(std::string op, std::string device, std::vector<int64_t> given) {
  RouteDims dims{};
  MORI_CHECK(given.size() <= dims.size(), "route: at most ", dims.size(), " dimensions, got ", given.size());
  for (size_t i = 0; i < given.size(); ++i) dims[i] = given[i];
  for (const Table& table : tables()) {
    if (table.op != op || table.device != device) continue;
    size_t i = 0;
    while (i + 1 < table.count && !table.rows[i].takes(dims)) ++i;
    return std::string(table.rows[i].kernel) + "\t" + table.rows[i].why;
  }
  fail("route: ", op, " has no kernel for device '", device, "' in this build (built: ", MORI_BUILT_BACKENDS, ")");
}

// "backends=cpu;torch=2.13.0": also searched for in the file itself by mori_ops/__init__.py when it cannot be loaded.
std::string build_info() { return "mori_build:backends=" MORI_BUILT_BACKENDS ";torch=" MORI_BUILT_TORCH ";"; }

}  // namespace

void RegisterRoutes::add(const char* op, const char* device, const Route* rows, size_t count) {
  tables().push_back({op, device, rows, count});
}

}  // namespace mori

STABLE_TORCH_LIBRARY_IMPL(mori, CompositeExplicitAutograd, m) {
  m.impl("_route", TORCH_BOX(&mori::route));
  m.impl("build_info", TORCH_BOX(&mori::build_info));
}
