// Words of the attributes that are texts.
#pragma once

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

namespace tformer {

// Returns what is before the first separator, and removes it from the text with the separator.
inline std::string_view take_until(char separator, std::string_view& text) {
  const size_t end = std::min(text.find(separator), text.size());
  const std::string_view taken = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return taken;
}

// The number that a word is, if it is nothing else.
inline std::optional<size_t> number_of(std::string_view word) {
  size_t number = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  return number;
}

}  // namespace tformer
