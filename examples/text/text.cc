// SPDX-License-Identifier: BSD-3-Clause
#include "text.h"

#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>

Text load_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  Text text;
  const std::set<char> occurring(all.begin(), all.end());
  text.letters.assign(occurring.begin(), occurring.end());
  const auto numbers = text.numbers(all);
  const auto cut = numbers.size(0) * 9 / 10;
  text.train = numbers.narrow(0, 0, cut);
  text.held_out = numbers.narrow(0, cut, numbers.size(0) - cut);
  return text;
}

std::string Text::spell(const torch::Tensor& numbers) const {
  std::string words;
  for (std::int64_t i = 0; i < numbers.size(0); ++i)
    words += letters[static_cast<std::size_t>(numbers[i].item<std::int64_t>())];
  return words;
}

torch::Tensor Text::numbers(const std::string& words) const {
  std::vector<std::int64_t> all;
  for (const char letter : words) {
    const auto at = letters.find(letter);
    if (at == std::string::npos)
      throw std::runtime_error(std::string("the letter '") + letter +
                               "' does not occur in the text");
    all.push_back(static_cast<std::int64_t>(at));
  }
  return torch::tensor(all, torch::kInt64);
}

Windows windows_at(const torch::Tensor& text, const torch::Tensor& starts, std::int64_t length) {
  const auto places = starts.unsqueeze(1) + torch::arange(length);
  return {text.index_select(0, places.flatten()).view_as(places),
          text.index_select(0, places.flatten() + 1).view_as(places)};
}
