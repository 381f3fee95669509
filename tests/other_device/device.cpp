// A device of its own, played in the host's memory: what meets a tensor of the CPU there fails, as it does on a GPU.
//
// Operators run on the CPU, on the same memory.  PrivateUse1 is the key that torch keeps for devices it does not know.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <set>
#include <string>

using at::IntArrayRef;
using at::MemoryFormat;
using at::ScalarType;
using at::Tensor;
using c10::SymIntArrayRef;

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;

struct Allocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &c10::free_cpu, c10::Device(kind, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Allocator allocator;

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    if (storage.data()) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

IntArrayRef plain(SymIntArrayRef sizes) { return C10_AS_INTARRAYREF_SLOW(sizes); }

// The same memory, as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const auto& storage = tensor.storage();
  const int64_t count = storage.nbytes() / tensor.element_size();
  return at::from_blob(storage.mutable_data(), {count}, at::TensorOptions().dtype(tensor.dtype()))
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

Tensor empty(SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(plain(size), &allocator, keys, dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  const auto type = dtype.value_or(at::kFloat);
  return at::detail::empty_strided_generic(plain(size), plain(stride), &allocator, keys, type);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (to.numel()) on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) { return on_cpu(tensor).item(); }

const Tensor& resize(const Tensor& tensor, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  return at::native::resize_(tensor, plain(size), format);
}

Tensor& set_storage(Tensor& tensor, c10::Storage storage, c10::SymInt offset, SymIntArrayRef size,
                    SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, storage, offset.expect_int(), plain(size), plain(stride));
}

Tensor as_strided(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(tensor, plain(size), plain(stride), start);
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) { return at::native::view(tensor, plain(size)); }

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, plain(size), plain(stride));
}

// What a composite operator asks of a device that it does not know.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  std::optional<Tensor> added;
  if (bias && bias->defined()) added = bias->cpu();
  return at::convolution(input.cpu(), weight.cpu(), added, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

// Of integers, too, as on a GPU and not on a CPU.
Tensor histc(const Tensor& values, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return at::histc(values.cpu().to(at::kDouble), bins, low, high).to(values.options());
}

// By their tensors of indices, which may be of the CPU where the others are not.
bool is_indexing(const std::string& name) {
  static const std::set<std::string> names = {"aten::index", "aten::_unsafe_index", "aten::index_put",
                                              "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"};
  return names.count(name);
}

// As on a GPU: single numbers of the CPU may meet tensors of the device, and so may indices; nothing else may.
void refuse_a_mixture(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().operator_name().name;
  bool here = false, cpu = false;
  const auto look = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (!tensor.is_cpu()) here = true;
    else if (tensor.dim()) cpu = true;
  };
  const auto first = stack.size() - op.schema().arguments().size();
  for (size_t i = first; i < stack.size(); i++) {
    if (is_indexing(name) && i == first + 1) continue;
    if (stack[i].isTensor()) look(stack[i].toTensor());
    if (stack[i].isTensorList())
      for (const Tensor& tensor : stack[i].toTensorVector()) look(tensor);
  }
  // The key of the device is that of one of the tensors: if it is none of these, it is that of an index.
  TORCH_CHECK(!(cpu && (here || is_indexing(name))), "Expected all tensors to be on the same device, in ", name);
}

// A GPU finds an index beyond the end of a tensor by itself, and is of no use to the process from then on.
bool lost = false;

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_a_mixture(op, *stack);
  try {
    if (!lost) at::native::cpu_fallback(op, stack);
  } catch (const c10::Error& error) {
    const std::string said = error.what_without_backtrace();
    lost = said.rfind("index ", 0) == 0 && said.find(" out of ") != std::string::npos;
    if (!lost) throw;
  }
  TORCH_CHECK(!lost, "device-side assert triggered");
}

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<kind>);
REGISTER_ALLOCATOR(kind, &allocator);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("convolution_overrideable", &convolution);
  m.impl("histc", &histc);
}

extern "C" void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
