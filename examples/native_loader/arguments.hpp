// The command lines of these programs: positional arguments, --name VALUE and --flag, in any order.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace marlin {

struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline int parse_number(const std::string& text) {
    const bool digits = !text.empty() && text.size() < 10 && text.find_first_not_of("0123456789") == std::string::npos;
    if (!digits) throw UsageError('"' + text + "\" is not a number");
    return std::stoi(text);
}

// Whether -h or --help is among them.
inline bool asks_for_help(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word == "-h" || word == "--help") return true;
    }
    return false;
}

class Arguments {
  public:
    Arguments(int argc, char** argv, std::size_t positional, const std::set<std::string>& options,
              const std::set<std::string>& flags) {
        for (int i = 1; i < argc; ++i) {
            const std::string word = argv[i];
            const std::string name = word.rfind("--", 0) == 0 ? word.substr(2) : "";
            if (name.empty()) {
                positional_.push_back(word);
            } else if (flags.count(name) != 0) {
                flags_.insert(name);
            } else if (options.count(name) != 0 && i + 1 < argc) {
                options_[name] = argv[++i];
            } else {
                throw UsageError(word + (options.count(name) != 0 ? " needs a value" : " is not an option"));
            }
        }
        if (positional_.size() != positional) throw UsageError("wrong number of arguments");
    }

    const std::string& positional(std::size_t index) const { return positional_.at(index); }
    int number(std::size_t index) const { return parse_number(positional_.at(index)); }
    bool flag(const std::string& name) const { return flags_.count(name) != 0; }
    std::string option(const std::string& name, const std::string& otherwise) const {
        const auto found = options_.find(name);
        return found == options_.end() ? otherwise : found->second;
    }
    int option(const std::string& name, int otherwise) const {
        const auto found = options_.find(name);
        return found == options_.end() ? otherwise : parse_number(found->second);
    }

  private:
    std::vector<std::string> positional_;
    std::set<std::string> flags_;
    std::map<std::string, std::string> options_;
};

}  // namespace marlin
