#include "ffi/bindings/workspace.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace b12x::ffi {
namespace {

using runtime::WorkspaceError;
using runtime::WorkspaceIsolation;
using runtime::WorkspacePool;
using runtime::WorkspaceRegistry;

nb::list Records(const WorkspacePool& pool) {
  std::vector<runtime::WorkspaceRecord> found;
  {
    nb::gil_scoped_release release;
    found = pool.Records();
  }
  nb::list records;
  for (const runtime::WorkspaceRecord& record : found) {
    const runtime::WorkspaceSpec& spec = record.workspace->spec();
    nb::dict fields;
    fields["id"] = record.workspace->id();
    fields["op"] = spec.op;
    fields["program"] = spec.program;
    fields["site"] = spec.site;
    fields["executable"] = record.workspace->executable();
    fields["lane"] = spec.lane;
    fields["bytes"] = spec.bytes;
    fields["aux_stream"] = spec.aux_stream;
    fields["devices"] = record.devices;
    fields["holders"] = record.holders;
    fields["refusal"] = record.refusal;
    fields["faults"] = record.faults;
    records.append(fields);
  }
  return records;
}

}  // namespace

void ExportWorkspaces(nb::module_& module, runtime::MakeDeviceWorkspace make) {
  WorkspaceRegistry::Get().SetMaker(std::move(make));
  nb::exception<WorkspaceError>(module, "WorkspaceError", PyExc_RuntimeError);
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<WorkspacePool>(module, "NativeWorkspacePool")
      .def("records", &Records)
      .def("bytes", &WorkspacePool::bytes, Release())
      .def("next_id", &WorkspacePool::next_id, Release())
      .def("lock", &WorkspacePool::Lock, nb::arg("locked"), Release())
      .def("locked", &WorkspacePool::locked, Release())
      .def("take_faults", &WorkspacePool::TakeFaults, Release())
      .def("retire", &WorkspacePool::Retire, nb::arg("first"), nb::arg("reason"),
           nb::arg("forever"), nb::arg("require_idle"), Release())
      .def("quiesce", &WorkspacePool::Quiesce, nb::arg("workspace"), Release())
      .def("free", &WorkspacePool::Free, nb::arg("workspace"), Release())
      .def("unregister",
           [](const WorkspacePool& pool) { WorkspaceRegistry::Get().Remove(pool.options().name); });
  module.def(
      "open_workspace_pool",
      [](std::string name, const std::string& isolation, std::vector<std::string> lanes,
         int64_t max_bytes, int64_t timeout_ms) {
        runtime::WorkspacePoolOptions options;
        options.name = std::move(name);
        options.isolation =
            isolation == "lane" ? WorkspaceIsolation::kLane : WorkspaceIsolation::kCallSite;
        options.lanes = std::move(lanes);
        options.max_bytes = max_bytes;
        options.timeout_ms = timeout_ms;
        return WorkspaceRegistry::Get().Open(std::move(options));
      },
      nb::arg("name"), nb::arg("isolation"), nb::arg("lanes"), nb::arg("max_bytes"),
      nb::arg("timeout_ms"));
  module.def(
      "find_workspace_pool",
      [](const std::string& name) { return WorkspaceRegistry::Get().Find(name); }, nb::arg("name"));
}

}  // namespace b12x::ffi
