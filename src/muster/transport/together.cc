#include "muster/transport/together.h"

#include <utility>

#include "muster/transport/fabric.h"

namespace muster::transport {
namespace {

constinit thread_local Together* innermost = nullptr;

}  // namespace

Together::Together(Fabric& fabric) : fabric_(fabric), inner_(of(fabric) != nullptr) {
  if (!inner_) outer_ = std::exchange(innermost, this);
}

Together::~Together() {
  if (inner_) return;
  Together** place = &innermost;  // of two fabrics' stretches either may end first
  while (*place != nullptr && *place != this) place = &(*place)->outer_;
  if (*place == this) *place = outer_;
  write();
}

Together* Together::of(const Fabric& fabric) {
  Together* each = innermost;
  while (each != nullptr && &each->fabric_ != &fabric) each = each->outer_;
  return each;
}

void Together::write() {
  if (std::exchange(gathered_, false)) fabric_.write_gathered();
}

Together::Aside::Aside() : kept_(std::exchange(innermost, nullptr)) {
  for (Together* each = kept_; each != nullptr; each = each->outer_) each->write();
}

Together::Aside::~Aside() { innermost = kept_; }

}  // namespace muster::transport
