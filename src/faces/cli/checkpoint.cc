// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoint/format/convert.h"
#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/history.h"
#include "checkpoint/format/load.h"
#include "faces/cli/json_line.h"
#include "faces/cli/parse.h"
#include "faces/cli/printable.h"

namespace muster::cli {
namespace {

int complain(const std::string& why) {
  std::cerr << "muster " << (why.starts_with("checkpoint: ") ? "" : "checkpoint: ")
            << printable(why) << "\n";
  return 1;
}

std::string size_text(std::uint64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

std::string step_text(const shards::Index& index) {
  return index.step ? std::to_string(*index.step) : "-";
}

nlohmann::json step_json(const shards::Index& index) {
  return index.step ? nlohmann::json(*index.step) : nlohmann::json();
}

/// The fields of a whole checkpoint that `ls` and `show` have in common.
nlohmann::json checkpoint_json(const std::string& path, const shards::Index& index) {
  return {{"path", path},
          {"step", step_json(index)},
          {"ranks", index.world_size},
          {"tensor_count", index.tensors.size()},
          {"file_count", index.files.size()},
          {"bytes", index.bytes()},
          {"saved_at", index.saved_at},
          {"finished", true}};
}

/// The rows of `ls` as one line each.
int list_json(const std::string& folder) {
  int result = 0;
  for (const std::string& path : shards::checkpoints_in(folder)) {
    const auto index = shards::open_index(path);
    if (index)
      std::cout << json_line(checkpoint_json(path, *index));
    else
      result = complain(index.status().message());
  }
  for (const std::string& path : shards::unfinished_in(folder))
    std::cout << json_line({{"path", path}, {"finished", false}});
  return result;
}

int list(const std::string& given, bool as_json) {
  const auto local = shards::local_path(given);
  if (!local) return complain(local.status().message());
  const std::string& folder = *local;
  const auto all = shards::checkpoints_in(folder);
  if (!shards::exists(folder)) return complain(folder + " is not there");
  if (as_json) return list_json(folder);
  std::printf("%10s %6s %8s %10s  %-20s  %s\n", "step", "ranks", "tensors", "size", "saved",
              "path");
  int result = 0;
  for (const std::string& path : all) {
    const auto index = shards::open_index(path);
    if (!index) {
      result = complain(index.status().message());
      continue;
    }
    std::printf("%10s %6d %8zu %10s  %-20s  %s\n", step_text(*index).c_str(), index->world_size,
                index->tensors.size(), size_text(index->bytes()).c_str(),
                printable_line(index->saved_at).c_str(), printable_line(path).c_str());
  }
  for (const std::string& path : shards::unfinished_in(folder))
    std::printf("%10s %6s %8s %10s  %-20s  %s\n", "-", "-", "-", "-", "never finished",
                printable_line(path).c_str());
  return result;
}

/// Without what says how a state is made of dictionaries.
nlohmann::json values_of(const shards::Index& index) {
  auto values = nlohmann::json::parse(index.values, nullptr, false);
  if (!values.is_object()) return nlohmann::json::object();
  std::erase_if(values.get_ref<nlohmann::json::object_t&>(),
                [](const auto& each) { return each.first.starts_with("__muster__"); });
  return values;
}

int show_json(const std::string& path, const shards::Index& index) {
  nlohmann::json out = checkpoint_json(path, index), tensors = nlohmann::json::object();
  for (const auto& [name, tensor] : index.tensors)
    tensors[name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.sizes}, {"pieces", tensor.pieces.size()}};
  out["tensors"] = std::move(tensors);
  out["values"] = values_of(index);
  std::cout << json_line(out);
  return 0;
}

int show(const std::string& path, bool as_json) {
  const auto index = shards::open_index(path);
  if (!index) return complain(index.status().message());
  if (as_json) return show_json(path, *index);
  std::printf("%s: step %s, saved by %d ranks at %s, %zu tensors in %zu files, %s\n", path.c_str(),
              step_text(*index).c_str(), index->world_size, printable_line(index->saved_at).c_str(),
              index->tensors.size(), index->files.size(), size_text(index->bytes()).c_str());
  for (const auto& [name, tensor] : index->tensors)
    std::printf("  %-8s %-20s %3zu pieces  %s\n", tensor.dtype.c_str(),
                shards::text_of(tensor.sizes).c_str(), tensor.pieces.size(),
                printable_line(name).c_str());
  const auto values = values_of(*index);
  for (const auto& [name, value] : values.items())
    std::printf("  %s = %s\n", printable_line(name).c_str(), printable_line(value.dump()).c_str());
  return 0;
}

int verify(const std::string& path, bool as_json) {
  const auto index = shards::open_index(path);
  if (!index) return complain(index.status().message());
  const auto wrong = shards::verify(*index);
  if (as_json) {
    std::cout << json_line({{"path", path},
                            {"whole", wrong.empty()},
                            {"faults", wrong},
                            {"file_count", index->files.size()},
                            {"bytes", index->bytes()}});
    return wrong.empty() ? 0 : 1;
  }
  for (const std::string& each : wrong) std::cout << printable_line(each) << "\n";
  if (!wrong.empty())
    return complain(path + " is damaged: " + std::to_string(wrong.size()) +
                    (wrong.size() == 1 ? " fault" : " faults"));
  std::printf("%s: every byte is as it was saved (%s in %zu files)\n", path.c_str(),
              size_text(index->bytes()).c_str(), index->files.size());
  return 0;
}

bool has_ending(const std::string& path, const std::vector<std::string>& endings) {
  const std::string ending = std::filesystem::path(path).extension().string();
  return std::find(endings.begin(), endings.end(), ending) != endings.end();
}

int convert(const std::string& from, const std::string& to, const std::string& prefix) {
  const std::vector<std::string> of_torch{".pt", ".pth", ".bin"};
  if (shards::exists(from + "/.metadata"))
    return complain(from +
                    " is in torch's format, whose .metadata is a pickle: reading it can run "
                    "code of its author. If you trust that: python -m muster.checkpoint "
                    "--trust " +
                    from + " " + to);
  if (has_ending(from, of_torch) || has_ending(to, of_torch))
    return complain("files of torch.save are converted by torch: python -m muster.checkpoint " +
                    from + " " + to);
  Status done;
  if (shards::exists(from + "/" + shards::kIndexName)) {
    const auto index = shards::open_index(from);
    done = index ? shards::export_whole(*index, to, {.prefix = prefix}) : index.status();
  } else {
    const auto index = shards::open_safetensors(from);
    done = index ? shards::import_safetensors(*index, to) : index.status();
  }
  return done.ok() ? 0 : complain(done.message());
}

struct CheckpointOptions {
  std::string path, target, prefix;
  bool json = false;
};

}  // namespace

Command checkpoint_command() {
  auto app =
      make_app("muster checkpoint",
               "Sharded checkpoints: what is there, whether it is whole, and other forms of it.");
  app->require_subcommand(1);
  auto options = std::make_shared<CheckpointOptions>();
  auto* const ls = app->add_subcommand("ls", "the checkpoints in a folder, oldest first");
  ls->add_option("folder", options->path, "the folder that checkpoints are saved in")->required();
  auto* const details = app->add_subcommand("show", "tensors and values of one checkpoint");
  details->add_option("checkpoint", options->path, "its folder")->required();
  auto* const check =
      app->add_subcommand("verify", "read every byte and hold it against its digest");
  check->add_option("checkpoint", options->path, "its folder")->required();
  for (CLI::App* each : {ls, details, check}) each->add_flag("--json", options->json, kJsonHelp);
  auto* const other = app->add_subcommand(
      "convert",
      "a checkpoint to whole safetensors files, which transformers loads; or a folder of "
      "safetensors files, as torch's HuggingFaceStorageWriter writes it, to a checkpoint");
  other->add_option("from", options->path, "a checkpoint, or a folder of safetensors files")
      ->required();
  other->add_option("to", options->target, "a new folder")->required();
  other->add_option("--prefix", options->prefix,
                    "export the tensors whose names begin so, without it: model.");
  return make_command(app, [=] {
    if (ls->parsed()) return list(options->path, options->json);
    if (details->parsed()) return show(options->path, options->json);
    if (check->parsed()) return verify(options->path, options->json);
    return convert(options->path, options->target, options->prefix);
  });
}

}  // namespace muster::cli
