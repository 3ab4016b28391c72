// Turns the faults of a kernel into calls of a handler, for as long as an object lives.
#pragma once

#include <signal.h>

#include <array>
#include <vector>

namespace msl {

class Signals {
 public:
  using Handler = void (*)(int signal, char* address);

  // The handler has a stack of its own, so that a kernel's stack overflow can be told.
  explicit Signals(Handler handler) : stack_(64 * 1024) {
    handler_ = handler;
    stack_t stack = {};
    stack.ss_sp = stack_.data();
    stack.ss_size = stack_.size();
    sigaltstack(&stack, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = [](int signal, siginfo_t* info, void*) { handler_(signal, static_cast<char*>(info->si_addr)); };
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (size_t i = 0; i < kSignals.size(); i++) sigaction(kSignals[i], &action, &old_[i]);
  }
  Signals(const Signals&) = delete;
  ~Signals() {
    for (size_t i = 0; i < kSignals.size(); i++) sigaction(kSignals[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr std::array<int, 4> kSignals = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  static inline Handler handler_ = nullptr;
  std::vector<char> stack_;
  stack_t old_stack_;
  struct sigaction old_[kSignals.size()];
};

}  // namespace msl
