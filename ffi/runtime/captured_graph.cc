#include "ffi/runtime/captured_graph.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "ffi/runtime/cuda_check.h"

namespace b12x::runtime {
namespace {

std::string NameOf(cudaGraphNode_t node) {
  cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
  CudaCheck(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
  switch (type) {
    case cudaGraphNodeTypeKernel: {
      cudaKernelNodeParams params{};
      const char* name = nullptr;
      // A kernel of somebody else's module has no name here.
      if (cudaGraphKernelNodeGetParams(node, &params) != cudaSuccess ||
          cudaFuncGetName(&name, params.func) != cudaSuccess) {
        cudaGetLastError();
        return "kernel";
      }
      return name;
    }
    case cudaGraphNodeTypeMemcpy:
      return "memcpy";
    case cudaGraphNodeTypeMemset:
      return "memset";
    case cudaGraphNodeTypeEmpty:
      return "empty";
    default:
      return "node of type " + std::to_string(static_cast<int>(type));
  }
}

}  // namespace

void WalkCapture(cudaStream_t stream, LaunchRecord* record) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  CudaCheck(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr),
            "cudaStreamGetCaptureInfo");
  if (status != cudaStreamCaptureStatusActive) return;
  size_t num_nodes = 0, num_edges = 0;
  CudaCheck(cudaGraphGetNodes(graph, nullptr, &num_nodes), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(num_nodes);
  if (num_nodes > 0) {
    CudaCheck(cudaGraphGetNodes(graph, nodes.data(), &num_nodes), "cudaGraphGetNodes");
  }
  for (const cudaGraphNode_t node : nodes) record->nodes.push_back(NameOf(node));
  CudaCheck(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &num_edges), "cudaGraphGetEdges");
  if (num_edges == 0) return;
  std::vector<cudaGraphNode_t> from(num_edges), to(num_edges);
  std::vector<cudaGraphEdgeData> data(num_edges);  // without it, programmatic edges are an error
  CudaCheck(cudaGraphGetEdges(graph, from.data(), to.data(), data.data(), &num_edges),
            "cudaGraphGetEdges");
  const auto place = [&](cudaGraphNode_t node) {
    return static_cast<int>(std::find(nodes.begin(), nodes.end(), node) - nodes.begin());
  };
  for (size_t i = 0; i < num_edges; ++i) record->edges.emplace_back(place(from[i]), place(to[i]));
}

}  // namespace b12x::runtime
