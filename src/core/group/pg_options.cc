#include "core/group/pg_options.h"

#include <string>

#include "core/group/creation/backend_registry.h"
#include "core/group/errors.h"

namespace muster {

void check_pg_options(const ProcessGroupOptions* options, const BackendConfig& config,
                      std::string_view caller) {
  if (options == nullptr) return;
  const bool any_registered = options->backend() == Backend::UNDEFINED;
  for (const auto& [device, backend] : config.entries())
    if (any_registered ? group::registered_backend(backend.name()) != nullptr
                       : backend == options->backend())
      return;
  throw DistBackendError(
      std::string(caller) + ": pg_options are " + std::string(options->type_name()) +
          ", which backend '" + config.text() + "' cannot use; leave them out" +
          (any_registered ? "" : ", or name backend '" + std::string(options->backend()) + "'"),
      Code::unsupported);
}

}  // namespace muster
