#include "ffi/bindings/launch_log.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ffi/runtime/launch_log.h"

namespace nb = nanobind;

namespace b12x::ffi {

void ExportLaunchLog(nb::module_& module) {
  module.def("record_launches", [](bool on) { runtime::LaunchLog::Get().Turn(on); }, nb::arg("on"));
  module.def("take_launches", [] {
    nb::list records;
    for (const runtime::LaunchRecord& record : runtime::LaunchLog::Get().Take()) {
      nb::dict fields;
      fields["op"] = record.op;
      fields["steps"] = record.steps;
      fields["nodes"] = record.nodes;
      fields["edges"] = record.edges;
      records.append(fields);
    }
    return records;
  });
}

}  // namespace b12x::ffi
