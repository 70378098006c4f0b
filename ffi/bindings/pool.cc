#include "ffi/bindings/pool.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace b12x::ffi {
namespace {

using runtime::ChannelError;
using runtime::ChannelMemory;
using runtime::Isolation;
using runtime::Pool;
using runtime::PoolRegistry;

Isolation ParseIsolation(const std::string& name) {
  if (name == "call_site") return Isolation::kCallSite;
  if (name == "executable") return Isolation::kExecutable;
  if (name == "lane") return Isolation::kLane;
  throw nb::value_error("isolation must be 'call_site', 'executable' or 'lane'");
}

std::shared_ptr<ChannelMemory> MemoryOf(const Pool& pool, int64_t id) {
  const auto channel = pool.Find(id);
  if (channel == nullptr) {
    throw ChannelError("pool '" + pool.options().name + "' has no channel " + std::to_string(id));
  }
  return channel->shared_memory();
}

nb::list Records(const Pool& pool) {
  std::vector<runtime::ChannelRecord> found;
  {
    nb::gil_scoped_release release;
    found = pool.Records();
  }
  nb::list records;
  for (const runtime::ChannelRecord& record : found) {
    const runtime::Channel& channel = *record.channel;
    nb::dict fields;
    fields["id"] = channel.id();
    fields["op"] = channel.spec().op;
    fields["program"] = channel.spec().program;
    fields["site"] = channel.spec().site;
    fields["executable"] = channel.executable();
    fields["lane"] = channel.spec().lane;
    fields["capacity"] = channel.capacity();
    fields["bytes"] = record.bytes;
    fields["holders"] = record.holders;
    fields["poisoned"] = channel.poisoned();
    fields["refusal"] = channel.refusal();
    records.append(fields);
  }
  return records;
}

}  // namespace

void ExportPools(nb::module_& module, Pool::MakeMemory (*make_memory)(runtime::Exchange)) {
  nb::exception<ChannelError>(module, "ChannelError", PyExc_RuntimeError);
  // A pool's mutex is held while it calls back into Python: nobody may wait for it with Python's
  // lock.
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Pool>(module, "NativePool")
      .def("records", &Records)
      .def("bytes", &Pool::bytes, Release())
      .def("next_id", &Pool::next_id, Release())
      .def("retire", &Pool::Retire, nb::arg("first"), nb::arg("reason"), nb::arg("forever"),
           nb::arg("require_idle"), Release())
      .def("forget", &Pool::Forget, nb::arg("channel"), Release())
      .def(
          "quiesce",
          [](const Pool& pool, int64_t id, int rank) { MemoryOf(pool, id)->Quiesce(rank); },
          nb::arg("channel"), nb::arg("rank"), Release())
      .def(
          "close_imports",
          [](const Pool& pool, int64_t id, int rank) { MemoryOf(pool, id)->CloseImports(rank); },
          nb::arg("channel"), nb::arg("rank"), Release())
      .def(
          "free_exports",
          [](const Pool& pool, int64_t id, int rank) { MemoryOf(pool, id)->FreeExports(rank); },
          nb::arg("channel"), nb::arg("rank"), Release())
      .def("unregister", [](const Pool& pool) { PoolRegistry::Get().Remove(pool.options().name); });
  module.def(
      "open_pool",
      [make_memory](std::string name, std::string axis, std::string layout,
                    const std::string& isolation, int world_size, int num_groups,
                    const std::vector<std::tuple<int, int, int>>& places, int64_t timeout_ms,
                    int64_t max_bytes, nb::object publish, nb::object connect) {
        runtime::PoolOptions options;
        options.name = std::move(name);
        options.axis = std::move(axis);
        options.layout = std::move(layout);
        options.isolation = ParseIsolation(isolation);
        options.world_size = world_size;
        options.num_groups = num_groups;
        for (const auto& [ordinal, group, rank] : places) {
          options.places.push_back(runtime::Place{ordinal, group, rank});
        }
        options.timeout_ms = timeout_ms;
        options.max_bytes = max_bytes;
        runtime::Exchange exchange;
        if (!publish.is_none()) exchange.publish = nb::cast<decltype(exchange.publish)>(publish);
        if (!connect.is_none()) exchange.connect = nb::cast<decltype(exchange.connect)>(connect);
        return PoolRegistry::Get().Open(std::move(options), make_memory(std::move(exchange)));
      },
      nb::arg("name"), nb::arg("axis"), nb::arg("layout"), nb::arg("isolation"),
      nb::arg("world_size"), nb::arg("num_groups"), nb::arg("places"), nb::arg("timeout_ms"),
      nb::arg("max_bytes"), nb::arg("publish") = nb::none(), nb::arg("connect") = nb::none());
  module.def("channel_bytes", &runtime::ChannelBytes, nb::arg("message_bytes"),
             nb::arg("world_size"));
}

}  // namespace b12x::ffi
