/// The backends that a program or a plugin library has registered. Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "muster/backend.h"

namespace muster::group {

struct RegisteredBackend {
  std::string name;
  ExtendedBackendCreator make;
  std::vector<c10::DeviceType> devices;
};
/// Null if no backend has that lower-case name; otherwise valid for ever.
const RegisteredBackend* registered_backend(std::string_view name);
std::vector<std::string> registered_backends();
void add_backend(const std::string& name, ExtendedBackendCreator func,
                 const std::vector<std::string>& devices);

}  // namespace muster::group
