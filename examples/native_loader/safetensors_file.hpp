// A safetensors file that nobody vouches for: checked to the last byte of its header, then mapped.
//
// Header-only; needs C++17, POSIX and nlohmann/json. Beyond the safetensors rules it holds files to the limits that
// marlin-convert promises: 1,024 tensors, names of 127 plain ASCII characters, 4 dimensions, nothing empty.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace marlin {

using Json = nlohmann::json;
using Path = std::filesystem::path;

constexpr uint64_t kMaxHeader = 4u << 20;      // 1,024 tensors of the longest names need less than a tenth of it
constexpr std::ptrdiff_t kMaxMarks = 4 << 20;  // commas, colons and opening brackets of a JSON text
constexpr std::size_t kMaxTensors = 1024;
constexpr std::size_t kMaxName = 127;
constexpr std::size_t kMaxDimensions = 4;

// Text of a file in a message: short, and with nothing that a terminal would act on.
inline std::string printable(std::string_view text) {
    std::string out;
    for (char c : text.substr(0, 200)) out += c >= 32 && c < 127 ? c : '?';
    return text.size() > 200 ? out + "..." : out;
}

// Something is wrong with a file: which, and what.
class Error : public std::runtime_error {
  public:
    Error(const Path& file, const std::string& reason) : std::runtime_error(plain(file.string()) + ": " + printable(reason)) {}

  private:
    // A path may be in any script, but a manifest can have put control characters in it.
    static std::string plain(std::string path) {
        for (char& c : path) c = (c >= 0 && c < 32) || c == 127 ? '?' : c;
        return path;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Files

// A regular file open for reading.
class File {
  public:
    explicit File(Path path, int flags = 0) : path_(std::move(path)) {
        // O_NONBLOCK: opening a pipe that lies in the file's place must not wait for a writer.
        fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);
        if (fd_ < 0) throw Error(path_, std::string("cannot be opened: ") + std::strerror(errno));
        struct stat status {};
        const bool regular = ::fstat(fd_, &status) == 0 && S_ISREG(status.st_mode);
        if (!regular) {
            ::close(fd_);
            throw Error(path_, "is not a regular file");
        }
        size_ = static_cast<uint64_t>(status.st_size);
    }
    File(File&& other) noexcept
        : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}
    File& operator=(File&& other) noexcept {
        std::swap(path_, other.path_);
        std::swap(fd_, other.fd_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~File() {
        if (fd_ >= 0) ::close(fd_);
    }

    const Path& path() const { return path_; }
    int fd() const { return fd_; }
    uint64_t size() const { return size_; }

    void read(uint64_t offset, void* to, std::size_t count) const {
        auto* at = static_cast<char*>(to);
        while (count > 0) {
            const ssize_t got = ::pread(fd_, at, count, static_cast<off_t>(offset));
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) throw Error(path_, std::string("cannot be read: ") + std::strerror(errno));
            if (got == 0) throw Error(path_, "ends at byte " + std::to_string(offset) + " while it is being read");
            at += got;
            offset += static_cast<uint64_t>(got);
            count -= static_cast<std::size_t>(got);
        }
    }

    std::string read_all(uint64_t limit) const {
        if (size_ > limit) {
            throw Error(path_, "has " + std::to_string(size_) + " bytes, at most " + std::to_string(limit) + " are expected");
        }
        std::string text(size_, '\0');
        read(0, text.data(), text.size());
        return text;
    }

  private:
    Path path_;
    int fd_ = -1;
    uint64_t size_ = 0;
};

// A whole file mapped read-only and shared: pages come from the page cache and are not copied.
class Mapping {
  public:
    explicit Mapping(const File& file) : size_(file.size()) {
        void* at = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd(), 0);
        if (at == MAP_FAILED) throw Error(file.path(), std::string("cannot be mapped: ") + std::strerror(errno));
        data_ = static_cast<const std::byte*>(at);
    }
    Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~Mapping() {
        if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
    }

    const std::byte* data() const { return data_; }
    uint64_t size() const { return size_; }

  private:
    const std::byte* data_ = nullptr;
    uint64_t size_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// JSON: parsed with limits on nesting and on the number of values, of which the smallest take 40 times their length in
// memory, and without duplicate keys, of which most parsers silently take the last

class JsonBuilder : public nlohmann::json_sax<Json> {
  public:
    JsonBuilder(const Path& file, std::size_t max_depth) : file_(file), max_depth_(max_depth) {}
    Json take() { return std::move(root_); }

    bool null() override { return put(nullptr); }
    bool boolean(bool value) override { return put(value); }
    bool number_integer(int64_t value) override { return put(value); }
    bool number_unsigned(uint64_t value) override { return put(value); }
    bool number_float(double value, const std::string&) override { return put(value); }
    bool string(std::string& value) override { return put(std::move(value)); }
    bool binary(Json::binary_t&) override { return false; }
    bool start_object(std::size_t) override { return open(Json::object()); }
    bool start_array(std::size_t) override { return open(Json::array()); }
    bool end_object() override { return close(); }
    bool end_array() override { return close(); }
    bool key(std::string& name) override {
        key_ = std::move(name);
        return true;
    }
    bool parse_error(std::size_t, const std::string&, const Json::exception& error) override {
        throw Error(file_, std::string("is not valid JSON: ") + error.what());
    }

  private:
    bool put(Json value) { return add(std::move(value)) != nullptr; }
    bool open(Json value) {
        if (open_.size() == max_depth_) throw Error(file_, "the JSON is nested too deeply");
        open_.push_back(add(std::move(value)));
        return true;
    }
    bool close() {
        open_.pop_back();
        return true;
    }
    Json* add(Json value) {
        if (open_.empty()) return &(root_ = std::move(value));
        Json& parent = *open_.back();
        if (parent.is_array()) {
            parent.push_back(std::move(value));
            return &parent.back();
        }
        const auto added = parent.get_ref<Json::object_t&>().emplace(key_, std::move(value));
        if (!added.second) throw Error(file_, "the JSON has the key " + key_ + " twice");
        return &added.first->second;
    }

    const Path& file_;
    const std::size_t max_depth_;
    Json root_;
    std::string key_;
    std::vector<Json*> open_;  // objects and arrays that are not complete, the innermost last
};

inline Json parse_json(const Path& file, std::string_view text, std::size_t max_depth) {
    // The parser takes a NUL for the end of its input.
    if (text.find('\0') != std::string_view::npos) throw Error(file, "the JSON holds a NUL byte");
    // There is at most one more value or key than these.
    const std::ptrdiff_t marks =
        std::count_if(text.begin(), text.end(), [](char c) { return c == ',' || c == ':' || c == '[' || c == '{'; });
    if (marks > kMaxMarks) {
        throw Error(file, "the JSON has " + std::to_string(marks) + " commas, colons and opening brackets, at most " +
                              std::to_string(kMaxMarks) + " are expected");
    }
    JsonBuilder builder(file, max_depth);
    Json::sax_parse(text.begin(), text.end(), &builder);
    return builder.take();
}

// A JSON object with the file it is from; its getters raise Error unless the value has the type.
class Fields {
  public:
    Fields(const Path& file, const Json& object, std::string where) : file_(file), object_(object), where_(where) {
        if (!object.is_object()) fail("is not an object");
    }

    [[noreturn]] void fail(const std::string& reason) const { throw Error(file_, where_ + " " + reason); }
    const Json& get(const char* key) const {
        const auto found = object_.find(key);
        if (found == object_.end()) fail(std::string("has no ") + key);
        return *found;
    }
    bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
    std::string text(const char* key) const {
        const Json& value = get(key);
        if (!value.is_string()) fail(std::string("has no string in ") + key);
        return value.get<std::string>();
    }
    uint64_t number(const char* key) const { return as_number(get(key), key); }
    int small(const char* key) const { return as_small(get(key), key); }
    const Json& list(const char* key) const {
        const Json& value = get(key);
        if (!value.is_array()) fail(std::string("has no list in ") + key);
        return value;
    }
    std::vector<uint64_t> numbers(const char* key) const {
        std::vector<uint64_t> out;
        for (const Json& value : list(key)) out.push_back(as_number(value, key));
        return out;
    }
    std::vector<int> smalls(const char* key) const {
        std::vector<int> out;
        for (const Json& value : list(key)) out.push_back(as_small(value, key));
        return out;
    }

  private:
    // Fractions, negative numbers and those of more than 64 bits all have another JSON type in the parser.
    uint64_t as_number(const Json& value, const char* key) const {
        if (!value.is_number_unsigned()) fail(std::string("has no unsigned 64-bit number in ") + key);
        return value.get<uint64_t>();
    }
    int as_small(const Json& value, const char* key) const {
        const uint64_t number = as_number(value, key);
        if (number > 1'000'000) fail(std::string("has an impossible number in ") + key);
        return static_cast<int>(number);
    }

    const Path& file_;
    const Json& object_;
    std::string where_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Tensors

struct bf16 {
    uint16_t bits;
    explicit operator float() const {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
};

enum class Dtype { BOOL, U8, I8, F8_E4M3, F8_E5M2, I16, U16, F16, BF16, I32, U32, F32, I64, U64, F64 };

struct DtypeInfo {
    Dtype dtype;
    const char* name;
    uint64_t size;
};
constexpr DtypeInfo kDtypes[] = {
    {Dtype::BOOL, "BOOL", 1}, {Dtype::U8, "U8", 1},   {Dtype::I8, "I8", 1},     {Dtype::F8_E4M3, "F8_E4M3", 1},
    {Dtype::F8_E5M2, "F8_E5M2", 1}, {Dtype::I16, "I16", 2}, {Dtype::U16, "U16", 2}, {Dtype::F16, "F16", 2},
    {Dtype::BF16, "BF16", 2}, {Dtype::I32, "I32", 4}, {Dtype::U32, "U32", 4},   {Dtype::F32, "F32", 4},
    {Dtype::I64, "I64", 8},   {Dtype::U64, "U64", 8}, {Dtype::F64, "F64", 8},
};
inline const DtypeInfo& info(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)]; }

template <class T> struct DtypeOf;  // which dtype a C++ type reads
template <> struct DtypeOf<uint8_t> { static constexpr Dtype value = Dtype::U8; };
template <> struct DtypeOf<int8_t> { static constexpr Dtype value = Dtype::I8; };
template <> struct DtypeOf<int16_t> { static constexpr Dtype value = Dtype::I16; };
template <> struct DtypeOf<int32_t> { static constexpr Dtype value = Dtype::I32; };
template <> struct DtypeOf<int64_t> { static constexpr Dtype value = Dtype::I64; };
template <> struct DtypeOf<bf16> { static constexpr Dtype value = Dtype::BF16; };
template <> struct DtypeOf<float> { static constexpr Dtype value = Dtype::F32; };
template <> struct DtypeOf<double> { static constexpr Dtype value = Dtype::F64; };

// Elements of a tensor, row-major. Valid as long as the shard is open.
template <class T> class View {
  public:
    View(const T* data, uint64_t count) : data_(data), count_(count) {}
    const T* data() const { return data_; }
    uint64_t size() const { return count_; }
    const T* begin() const { return data_; }
    const T* end() const { return data_ + count_; }
    const T& operator[](uint64_t index) const { return data_[index]; }

  private:
    const T* data_;
    uint64_t count_;
};

struct Tensor {
    std::string name;
    Dtype dtype = Dtype::U8;
    std::vector<uint64_t> shape;
    uint64_t offset = 0;  // from the start of the file
    uint64_t size = 0;    // bytes
    const std::byte* data = nullptr;

    bool is_filler() const { return name.rfind("__pad__.", 0) == 0; }

    // The elements as T, which must be the C++ type of the dtype.
    template <class T> View<T> view() const {
        if (DtypeOf<T>::value != dtype) {
            throw std::invalid_argument(name + " is " + info(dtype).name + ", not " + info(DtypeOf<T>::value).name);
        }
        if (reinterpret_cast<std::uintptr_t>(data) % alignof(T) != 0) {
            throw std::invalid_argument(name + " is not aligned for " + info(dtype).name);
        }
        return View<T>(reinterpret_cast<const T*>(data), size / sizeof(T));
    }

    // Part `index` along the first dimension, such as one local expert of a stacked tensor.
    Tensor part(uint64_t index) const {
        if (shape.empty() || index >= shape[0]) throw std::out_of_range(name + " has no part " + std::to_string(index));
        const uint64_t bytes = size / shape[0];
        std::vector<uint64_t> rest(shape.begin() + 1, shape.end());
        return {name, dtype, std::move(rest), offset + index * bytes, bytes, data + index * bytes};
    }
};

inline Dtype dtype_named(const Fields& fields) {
    const std::string name = fields.text("dtype");
    for (const DtypeInfo& known : kDtypes) {
        if (name == known.name) return known.dtype;
    }
    fields.fail("has the unknown dtype " + name);
}

// Bytes of a tensor; raises Error for too many dimensions, an empty one, or more than 64 bits can count.
inline uint64_t byte_size(const Fields& fields, Dtype dtype, const std::vector<uint64_t>& shape) {
    if (shape.size() > kMaxDimensions) fields.fail("has more than 4 dimensions");
    uint64_t bytes = info(dtype).size;
    for (uint64_t extent : shape) {
        if (extent == 0) fields.fail("is empty");
        if (__builtin_mul_overflow(bytes, extent, &bytes)) fields.fail("has a shape that overflows");
    }
    return bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// One safetensors file

struct Header {
    uint64_t data_start = 0;  // 8 + H
    std::map<std::string, std::string> metadata;
    std::vector<Tensor> tensors;  // in file order, fillers included; data is not set yet
};

inline void check_name(const Path& file, const std::string& name) {
    const bool plain = std::all_of(name.begin(), name.end(), [](char c) { return c > 32 && c < 127 && c != '\\' && c != '"'; });
    if (name.empty() || name.size() > kMaxName || !plain) {
        throw Error(file, "the tensor name " + name + " is not 1 to 127 plain ASCII characters");
    }
}

inline Tensor parse_tensor(const Path& file, const std::string& name, const Json& value, uint64_t data_start,
                           uint64_t data_size) {
    check_name(file, name);
    const Fields fields(file, value, name);
    Tensor tensor{name, dtype_named(fields), fields.numbers("shape"), 0, 0, nullptr};
    tensor.size = byte_size(fields, tensor.dtype, tensor.shape);
    const std::vector<uint64_t> offsets = fields.numbers("data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1]) fields.fail("has data_offsets that are no range");
    if (offsets[1] > data_size) fields.fail("ends behind the end of the file");
    if (offsets[1] - offsets[0] != tensor.size) fields.fail("has data_offsets that do not fit its dtype and shape");
    tensor.offset = data_start + offsets[0];
    return tensor;
}

// Checks and parses the header; afterwards every byte of the file belongs to the header or to exactly one tensor.
inline Header parse_header(const File& file) {
    if (file.size() < 16) throw Error(file.path(), "is too short for a safetensors file");
    unsigned char prefix[8];
    file.read(0, prefix, sizeof prefix);
    uint64_t length = 0;
    for (int i = 7; i >= 0; --i) length = length << 8 | prefix[i];
    if (length > kMaxHeader) throw Error(file.path(), "claims a header of " + std::to_string(length) + " bytes");
    if (length > file.size() - 8) throw Error(file.path(), "is truncated: its header alone needs more bytes");
    std::string text(length, '\0');
    file.read(8, text.data(), text.size());
    if (text.empty() || text[0] != '{') throw Error(file.path(), "has a header that does not start with {");

    Header header;
    header.data_start = 8 + length;
    const uint64_t data_size = file.size() - header.data_start;
    const Json document = parse_json(file.path(), text, 3);
    for (const auto& [name, value] : document.items()) {
        if (name != "__metadata__") {
            header.tensors.push_back(parse_tensor(file.path(), name, value, header.data_start, data_size));
            if (header.tensors.size() > kMaxTensors) throw Error(file.path(), "has more than 1,024 tensors");
            continue;
        }
        const Fields fields(file.path(), value, name);
        for (const auto& item : value.items()) header.metadata[item.key()] = fields.text(item.key().c_str());
    }
    std::sort(header.tensors.begin(), header.tensors.end(),
              [](const Tensor& a, const Tensor& b) { return a.offset < b.offset; });
    uint64_t position = header.data_start;
    for (const Tensor& tensor : header.tensors) {
        if (tensor.offset < position) throw Error(file.path(), tensor.name + " overlaps the tensor before it");
        if (tensor.offset > position) throw Error(file.path(), "has a hole before " + tensor.name);
        position += tensor.size;
    }
    if (position != file.size()) {
        throw Error(file.path(), "has " + std::to_string(file.size() - position) + " bytes behind its last tensor");
    }
    return header;
}

// A safetensors file, checked and then mapped. Moving it keeps the addresses.
class TensorFile {
  public:
    explicit TensorFile(const Path& path) : TensorFile(File(path)) {}
    explicit TensorFile(File file) : TensorFile(std::move(file), [](const Header&) {}) {}
    // `check` is called with the header before anything is mapped.
    template <class Check> TensorFile(File file, Check check) : file_(std::move(file)), header_(parse_header(file_)) {
        check(header_);
        mapping_.emplace(file_);
        for (Tensor& tensor : header_.tensors) {
            tensor.data = mapping_->data() + tensor.offset;
            by_name_.emplace(tensor.name, &tensor - header_.tensors.data());
        }
    }

    const File& file() const { return file_; }
    const Header& header() const { return header_; }
    const std::vector<Tensor>& tensors() const { return header_.tensors; }
    const std::byte* data() const { return mapping_->data(); }
    uint64_t data_start() const { return header_.data_start; }
    uint64_t data_size() const { return file_.size() - header_.data_start; }

    const Tensor* find(const std::string& name) const {
        const auto found = by_name_.find(name);
        return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
    }
    const Tensor& tensor(const std::string& name) const {
        if (const Tensor* found = find(name)) return *found;
        throw Error(file_.path(), "has no tensor " + name);
    }

  private:
    File file_;
    Header header_;
    std::optional<Mapping> mapping_;
    std::unordered_map<std::string, std::size_t> by_name_;
};

}  // namespace marlin
