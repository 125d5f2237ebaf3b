"""What is changed in Horovod's sdist so that tensors are taken where they are, or refused at once."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

# A rank that joined adds zeros to the others' tensors: on its GPU to those on GPUs, on the host to those on the host.
_JOIN = (
    Edit(
        "horovod/common/controller.cc",
        "  for (auto& request : requests) {\n    devices[request.request_rank()] = request.device();\n  }\n",
        "  // By rank; where some have joined, those of the others, which are fewer.\n"
        "  for (size_t i = 0; i < requests.size(); ++i) {\n"
        "    devices[(int)requests.size() == size_ ? requests[i].request_rank() : i] = requests[i].device();\n"
        "  }\n",
        "where rank 0 had joined, rank 1's device was written past the end of the list",
    ),
    Edit(
        "horovod/common/common.h",
        "                                std::shared_ptr<Tensor>* tensor) = 0;\n"
        "  virtual Framework framework() const = 0;\n",
        "                                std::shared_ptr<Tensor>* tensor) = 0;\n"
        "  // The same for host memory; null where there is none.\n"
        "  virtual std::shared_ptr<OpContext> OnHost() const { return nullptr; }\n"
        "  virtual Framework framework() const = 0;\n",
        "for the edits after",
    ),
    Edit(
        "horovod/torch/adapter_v2.h",
        "                       std::shared_ptr<Tensor>* tensor) override;\n  Framework framework() const override;\n",
        "                       std::shared_ptr<Tensor>* tensor) override;\n"
        "  std::shared_ptr<OpContext> OnHost() const override;\n"
        "  Framework framework() const override;\n",
        "for the next edit",
    ),
    Edit(
        "horovod/torch/adapter_v2.cc",
        "Status TorchOpContext::AllocateZeros(",
        "std::shared_ptr<OpContext> TorchOpContext::OnHost() const {\n"
        "  return std::make_shared<TorchOpContext>(CPU_DEVICE_ID, outputs_);\n"
        "}\n\n"
        "Status TorchOpContext::AllocateZeros(",
        "for the next edit",
    ),
    Edit(
        "horovod/common/tensor_queue.cc",
        "        TensorTableEntry entry;\n"
        "        join_iter->second.context->AllocateZeros(response.tensor_sizes()[i],\n"
        "                                                 response.tensor_type(),\n"
        "                                                 &(entry.tensor));\n\n"
        "        entry.output = entry.tensor;\n"
        "        entry.device = join_iter->second.device;\n"
        "        entry.context = join_iter->second.context;\n",
        "        TensorTableEntry entry;\n"
        "        entry.device = join_iter->second.device;\n"
        "        entry.context = join_iter->second.context;\n"
        "        if (entry.device != CPU_DEVICE_ID && !response.devices().empty() &&\n"
        "            response.devices()[0] == CPU_DEVICE_ID) {\n"
        "          if (auto host = entry.context->OnHost()) {\n"
        "            entry.device = CPU_DEVICE_ID;\n"
        "            entry.context = host;\n"
        "          }\n"
        "        }\n"
        "        entry.context->AllocateZeros(response.tensor_sizes()[i], response.tensor_type(), &(entry.tensor));\n\n"
        "        entry.output = entry.tensor;\n",
        "a rank that joined with a GPU went to NCCL for what the others reduced on the host: counts, small numbers",
    ),
)

DEVICES: tuple[Edit, ...] = (
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        "  if (tensor.device().is_cuda()) {\n    return tensor.device().index();\n",
        "  if (tensor.device().is_cuda()) {\n"
        "#if !HAVE_GPU\n"
        "    // Not an error of Horovod's own kind: another try would fail too.\n"
        "    throw std::invalid_argument(\n"
        '        "rank " + std::to_string(common::horovod_rank()) + ": this Horovod has no GPU operations. "\n'
        '        "Received: a tensor on " + tensor.device().str() + ". Build it for GPUs with `hvdtrain build`, or "\n'
        '        "train on the CPU with CUDA_VISIBLE_DEVICES=\\"\\".");\n'
        "#endif\n"
        "    return tensor.device().index();\n",
        "the background thread found out later, ended with an exception, and the rank waited for ever",
    ),
    Edit(
        "horovod/torch/cuda_util.cc",
        'dlopen("libcuda.so", RTLD_LAZY)',
        'dlopen("libcuda.so.1", RTLD_LAZY)',
        "the driver installs libcuda.so.1; without a version it is the toolkit's name for the linker",
    ),
    *_JOIN,
)
