// The Python module: compiled shaders, and calls of their kernels.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>

#include "machine.h"

namespace msl {
namespace {

// As in include/msl/entry.h.
struct BufferType {
  int elements, element_size;
  char element, is_const;
};

class Library {
 public:
  Library(const std::string& path, int kernels) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) throw std::runtime_error(dlerror());
    ThreadgroupVariable *begin, *end;
    symbol<void (*)(Runtime*, ThreadgroupVariable**, ThreadgroupVariable**)>("msl_bind")(Machine::get().interface(), &begin, &end);
    for (ThreadgroupVariable* v = begin; v < end; v++) place(*v);
    for (int i = 0; i < kernels; i++) {
      entries_.push_back(symbol<Entry>("msl_entry_" + std::to_string(i)));
      identities_.push_back(Machine::get().probe(entries_.back()));
    }
  }
  Library(const Library&) = delete;
  ~Library() { dlclose(handle_); }

  // Per parameter: (elements, element size, element kind, const).
  std::vector<std::tuple<int, int, char, bool>> parameters(int kernel, int count) const {
    std::vector<BufferType> types(count + 1);
    symbol<void (*)(BufferType*)>("msl_describe_" + std::to_string(kernel))(types.data());
    std::vector<std::tuple<int, int, char, bool>> result;
    for (int i = 0; i < count; i++) result.emplace_back(types[i].elements, types[i].element_size, types[i].element, types[i].is_const);
    return result;
  }

  int max_threads(int kernel) const { return identities_.at(kernel).max_threads; }

  size_t threadgroup_bytes(int kernel) const {
    size_t bytes = 0;
    for (const Variable& v : variables(kernel)) bytes += (v.bytes + Memory::kAlignment - 1) / Memory::kAlignment * Memory::kAlignment;
    return bytes;
  }

  // buffers: (name, address, bytes, writable); bindings: (buffer, byte offset) per argument.
  void dispatch(int kernel, const std::vector<std::tuple<std::string, uintptr_t, size_t, bool>>& buffers,
                const std::vector<std::pair<int, size_t>>& bindings, Size threads, Size group, bool checked, int order, unsigned seed,
                int poison, std::array<int, 4> behaviour) const {
    Memory& memory = Machine::get().memory();
    struct Unmap {
      Memory& memory;
      ~Unmap() { memory.unmap(); }
    } unmap{memory};
    std::vector<char*> mapped;
    for (const auto& [name, address, bytes, writable] : buffers)
      mapped.push_back(memory.map({name, reinterpret_cast<char*>(address), bytes, writable}).begin);
    std::vector<void*> arguments;
    for (const auto& [buffer, offset] : bindings) arguments.push_back(mapped.at(buffer) + offset);
    Machine::get().run({entries_.at(kernel), &variables(kernel), arguments.data(), threads, group, checked, Order(order), seed, poison,
                        {SumOrder(behaviour[0]), MatrixLayout(behaviour[1]), ProductOrder(behaviour[2]), CooperativeLayout(behaviour[3])}});
    memory.copy_back();
  }

 private:
  template <class F>
  F symbol(const std::string& name) const {
    void* address = dlsym(handle_, name.c_str());
    if (!address) throw std::runtime_error("no symbol " + name);
    return reinterpret_cast<F>(address);
  }

  void place(ThreadgroupVariable& v) {
    Variables& own = variables_[v.function];
    const size_t alignment = std::max<size_t>(v.alignment, Memory::kAlignment);
    const size_t offset = (Memory::arena_used(own) + alignment - 1) / alignment * alignment;
    if (offset + v.size + Memory::kRedZone > Memory::kArena)
      throw std::runtime_error(std::string("too much threadgroup memory in ") + v.function);
    own.push_back({v.name, offset, v.size});
    v.address = Machine::get().memory().arena() + offset;
  }
  const Variables& variables(int kernel) const {
    static const Variables none;
    const auto found = variables_.find(identities_.at(kernel).function);
    return found == variables_.end() ? none : found->second;
  }

  void* handle_;
  std::vector<Entry> entries_;
  std::vector<Identity> identities_;
  std::map<std::string, Variables> variables_;
};

}  // namespace
}  // namespace msl

PYBIND11_MODULE(MSL_MODULE_NAME, m) {
  pybind11::class_<msl::Library>(m, "Library")
      .def(pybind11::init<const std::string&, int>())
      .def("parameters", &msl::Library::parameters)
      .def("max_threads", &msl::Library::max_threads)
      .def("threadgroup_bytes", &msl::Library::threadgroup_bytes)
      .def("dispatch", &msl::Library::dispatch);
}
