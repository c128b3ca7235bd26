#include "jobs/launch/workers/error_file.h"

#include <fstream>
#include <nlohmann/json.hpp>

namespace muster::launch {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 20;

std::string text_of(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

}  // namespace

std::optional<WorkerError> parse_error_file(std::string_view text) {
  const auto file = nlohmann::json::parse(text, nullptr, false);
  if (!file.is_object()) return std::nullopt;
  const auto message = file.find("message");
  if (message == file.end()) return std::nullopt;
  if (message->is_string()) return WorkerError{message->get<std::string>(), {}};
  if (!message->is_object()) return std::nullopt;
  WorkerError error{text_of(*message, "message"), {}};
  if (error.message.empty()) return std::nullopt;
  const auto extra = message->find("extraInfo");
  if (extra != message->end() && extra->is_object()) error.stack = text_of(*extra, "py_callstack");
  return error;
}

std::optional<WorkerError> read_error_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string text(kMostBytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return parse_error_file(text);
}

}  // namespace muster::launch
