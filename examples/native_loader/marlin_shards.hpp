// Reads what `marlin-convert convert` writes: one rank's shards, mapped, checked and looked up by name.
//
// One header; needs C++17, POSIX and nlohmann/json. The format is described in schemas/README.md. Nothing in a file is
// trusted: everything is checked against the file's size and the manifest before the file is mapped, and what is wrong
// raises marlin::Error, which names the file. Digests are in marlin_digest.hpp.
//
//     marlin::Output out("k26-tp8");
//     marlin::Rank rank = out.open_rank(3);
//     marlin::Experts experts = *rank.layer(1).experts();
//     marlin::View<int32_t> words = experts.expert(17).w13_packed.view<int32_t>();
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
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace marlin {

using Json = nlohmann::json;
using Path = std::filesystem::path;

constexpr int kFormatVersion = 1;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kMaxHeader = 4u << 20;      // 1,024 tensors of the longest names need less than a tenth of it
constexpr uint64_t kMaxManifest = 256u << 20;  // that of Kimi-K2.6 at tp 8 is under 5 MB
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
    Error(const Path& file, const std::string& reason) : std::runtime_error(file.string() + ": " + printable(reason)) {}
};

// ---------------------------------------------------------------------------------------------------------------------
// Files

// A regular file open for reading.
class File {
  public:
    explicit File(Path path) : path_(std::move(path)) {
        // O_NONBLOCK: opening a pipe that lies in the file's place must not wait for a writer.
        fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
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
        if (size_ > limit) throw Error(path_, std::to_string(size_) + " bytes are more than a loader should take");
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
// JSON: parsed with a limit on nesting and without duplicate keys, of which most parsers silently take the last

inline Json parse_json(const Path& file, std::string_view text, std::size_t max_depth) {
    std::vector<std::set<std::string>> keys;  // one set per open object or array
    auto check = [&](int, Json::parse_event_t event, Json& value) {
        using Event = Json::parse_event_t;
        if (event == Event::object_start || event == Event::array_start) {
            if (keys.size() == max_depth) throw Error(file, "the JSON is nested too deeply");
            keys.emplace_back();
        } else if (event == Event::object_end || event == Event::array_end) {
            keys.pop_back();
        } else if (event == Event::key && !keys.back().insert(value.get<std::string>()).second) {
            throw Error(file, "the JSON has the key " + value.get<std::string>() + " twice");
        }
        return true;
    };
    // The parser takes a NUL for the end of its input.
    if (text.find('\0') != std::string_view::npos) throw Error(file, "the JSON holds a NUL byte");
    try {
        return Json::parse(text.begin(), text.end(), check);
    } catch (const Json::exception& error) {
        throw Error(file, std::string("is not valid JSON: ") + error.what());
    }
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

// ---------------------------------------------------------------------------------------------------------------------
// The manifest

struct ListedTensor {
    std::string name, digest;
    Dtype dtype;
    std::vector<uint64_t> shape;
    uint64_t offset, size;
    std::optional<uint64_t> experts;  // where in digests.bin the digests of a stacked tensor's experts are
};

struct FusedTensor {
    std::string name;
    Dtype dtype;
    std::vector<uint64_t> shape;
    uint64_t offset, size;
    std::vector<std::string> members;
};

struct ShardEntry {
    std::string path, unit, header, digest;
    std::optional<int> rank;  // none: common/
    uint64_t size;
    std::vector<ListedTensor> tensors;
    std::vector<FusedTensor> fused;
};

struct FileEntry {
    std::string path, digest;
    uint64_t size;
};

struct Manifest {
    Path path;
    Json document;  // as it stands
    std::string source_id, layout;
    uint64_t group_size = 0;
    int tp = 0, ep = 0;
    std::vector<int> ranks, layers;
    std::vector<ShardEntry> shards;
    std::vector<FileEntry> files;

    // A model constant, such as constant<double>("softmax_scale"); raises Error if it is not there or of another type.
    template <class T> T constant(const char* name) const {
        const Json& value = Fields(path, document["model"], "model").get(name);
        try {
            return value.get<T>();
        } catch (const Json::exception& error) {
            throw Error(path, std::string("the model constant ") + name + ": " + error.what());
        }
    }
};

// A path from the manifest, which must stay inside OUT.
inline std::string inner_path(const Fields& fields, const char* key) {
    const std::string text = fields.text(key);
    const Path path(text);
    bool inside = !text.empty() && path.is_relative() && text.find('\0') == std::string::npos;
    for (const Path& step : path) inside = inside && step != ".." && step != ".";
    if (!inside) fields.fail("names a path outside of the folder: " + text);
    return text;
}

inline ShardEntry parse_shard(const Path& file, const Json& value) {
    const Fields fields(file, value, "a shard");
    ShardEntry shard;
    shard.path = inner_path(fields, "path");
    shard.unit = fields.text("unit");
    shard.header = fields.text("header");
    shard.digest = fields.text("digest");
    shard.size = fields.number("size");
    if (fields.has("rank")) shard.rank = fields.small("rank");
    for (const Json& item : fields.list("tensors")) {
        const Fields tensor(file, item, "a tensor of " + shard.path);
        shard.tensors.push_back({tensor.text("name"), tensor.text("digest"), dtype_named(tensor), tensor.numbers("shape"),
                                 tensor.number("offset"), tensor.number("size"), std::nullopt});
        if (tensor.has("experts")) shard.tensors.back().experts = tensor.number("experts");
    }
    for (const Json& item : fields.list("fused")) {
        const Fields view(file, item, "a fused view of " + shard.path);
        FusedTensor fused{view.text("name"), dtype_named(view), view.numbers("shape"), view.number("offset"), 0, {}};
        fused.size = byte_size(view, fused.dtype, fused.shape);
        for (const Json& member : view.list("members")) {
            if (!member.is_string()) view.fail("has a member that is no name");
            fused.members.push_back(member.get<std::string>());
        }
        shard.fused.push_back(std::move(fused));
    }
    return shard;
}

inline Manifest read_manifest(const Path& out) {
    const File file(out / "manifest.json");
    Manifest manifest;
    manifest.path = file.path();
    manifest.document = parse_json(file.path(), file.read_all(kMaxManifest), 16);
    const Fields top(manifest.path, manifest.document, "the manifest");
    if (top.text("format") != "marlin-convert") top.fail("is of the format " + top.text("format"));
    if (top.small("format_version") != kFormatVersion) {
        top.fail("has format version " + std::to_string(top.small("format_version")) + "; this loader reads 1");
    }
    const Fields layout(manifest.path, top.get("layout"), "layout");
    manifest.layout = layout.text("id");
    if (manifest.layout != "moe_wna16_marlin.u4b8") layout.fail("is " + manifest.layout + ", not moe_wna16_marlin.u4b8");
    // -1: one group for all of K, which the shapes say as well.
    if (layout.get("group_size").is_number_unsigned()) manifest.group_size = layout.number("group_size");
    manifest.source_id = Fields(manifest.path, top.get("source"), "source").text("id");
    const Fields parallel(manifest.path, top.get("parallel"), "parallel");
    manifest.tp = parallel.small("tp");
    manifest.ep = parallel.small("ep");
    if (manifest.tp < 1 || manifest.ep < 1 || manifest.tp % manifest.ep != 0) parallel.fail("has an ep that does not divide tp");
    manifest.ranks = top.smalls("ranks");
    manifest.layers = top.smalls("layers");
    Fields(manifest.path, top.get("model"), "model");
    for (const Json& item : top.list("shards")) manifest.shards.push_back(parse_shard(manifest.path, item));
    for (const Json& item : top.list("files")) {
        const Fields entry(manifest.path, item, "a file");
        manifest.files.push_back({inner_path(entry, "path"), entry.text("digest"), entry.number("size")});
    }
    return manifest;
}

// ---------------------------------------------------------------------------------------------------------------------
// A shard of a rank

struct Expert {
    Tensor w13_packed, w13_scale, w2_packed, w2_scale;
};

// The routed experts of a layer that a rank owns, or its slice of them.
struct Experts {
    uint64_t first = 0, count = 0;          // global numbers first to first + count - 1
    uint64_t hidden = 0, intermediate = 0;  // intermediate: this rank's slice, padding included
    Tensor w13_packed, w13_scale, w2_packed, w2_scale;

    // By its number in the whole model.
    Expert expert(uint64_t number) const {
        if (number < first || number - first >= count) {
            throw std::out_of_range("expert " + std::to_string(number) + " is not on this rank");
        }
        const uint64_t at = number - first;
        return {w13_packed.part(at), w13_scale.part(at), w2_packed.part(at), w2_scale.part(at)};
    }
};

class Shard : public TensorFile {
  public:
    Shard(const Manifest& manifest, const ShardEntry& entry)
        : TensorFile(sized(manifest, entry), [&](const Header& header) { check(manifest, entry, header); }),
          entry_(entry) {
        load_experts(manifest);
    }

    const ShardEntry& entry() const { return entry_; }
    // The routed experts, if this is the shard of a MoE layer.
    const std::optional<Experts>& experts() const { return experts_; }

    // Neighbours that may be read as one tensor, under the name that the manifest gives them.
    Tensor fused(const std::string& name) const {
        for (const FusedTensor& view : entry_.fused) {
            if (view.name == name) return {name, view.dtype, view.shape, view.offset, view.size, data() + view.offset};
        }
        throw Error(file().path(), "has no fused view " + name);
    }

  private:
    // Before any byte is read or mapped: a mapping of a file that is shorter than its tensors kills the process later.
    static File sized(const Manifest& manifest, const ShardEntry& entry) {
        File file(manifest.path.parent_path() / entry.path);
        if (file.size() != entry.size) {
            throw Error(file.path(), "has " + std::to_string(file.size()) + " bytes, the manifest says " +
                                         std::to_string(entry.size) + (file.size() < entry.size ? ": truncated" : ""));
        }
        return file;
    }

    static void check(const Manifest& manifest, const ShardEntry& entry, const Header& header) {
        const Path file = manifest.path.parent_path() / entry.path;
        check_identity(manifest, entry, header, file);
        if (header.data_start % kPage != 0 || entry.size % kPage != 0) throw Error(file, "is not made of whole pages");
        if (header.tensors.size() != entry.tensors.size()) throw Error(file, "has other tensors than the manifest says");
        for (std::size_t i = 0; i < entry.tensors.size(); ++i) {
            const Tensor& has = header.tensors[i];
            const ListedTensor& says = entry.tensors[i];
            if (has.name != says.name || has.dtype != says.dtype || has.shape != says.shape ||
                has.offset != says.offset || has.size != says.size) {
                throw Error(file, "has " + has.name + " where the manifest says " + says.name + ", or it differs in form");
            }
            if (has.is_filler() && has.dtype != Dtype::U8) throw Error(file, has.name + " is a filler but not U8");
        }
        std::set<std::string> followers;
        for (const FusedTensor& view : entry.fused) check_fused(header, view, file, followers);
        for (const Tensor& tensor : header.tensors) {
            if (tensor.size >= kPage && tensor.offset % kPage != 0 && followers.count(tensor.name) == 0) {
                throw Error(file, tensor.name + " does not start on a page");
            }
        }
    }

    // What the file says it is against what was meant: this alone catches swapped files, ranks and conversions.
    static void check_identity(const Manifest& manifest, const ShardEntry& entry, const Header& header, const Path& file) {
        std::string layer = entry.unit;
        if (layer.rfind("layer-", 0) == 0) {
            layer = layer.substr(6);
            layer.erase(0, std::min(layer.find_first_not_of('0'), layer.size() - 1));
        }
        const std::pair<const char*, std::string> expected[] = {
            {"format", "marlin-convert"},
            {"format_version", std::to_string(kFormatVersion)},
            {"layout", manifest.layout},
            {"source", manifest.source_id},
            {"tp", std::to_string(manifest.tp)},
            {"ep", std::to_string(manifest.ep)},
            {"rank", entry.rank ? std::to_string(*entry.rank) : "common"},
            {"layer", layer},
            {"expert_range", expert_range(manifest, entry)},
        };
        for (const auto& [key, value] : expected) {
            const auto found = header.metadata.find(key);
            const std::string has = found == header.metadata.end() ? "nothing" : found->second;
            if (has != value) throw Error(file, std::string("is of ") + key + " " + has + ", expected " + value);
        }
    }

    static std::string expert_range(const Manifest& manifest, const ShardEntry& entry) {
        for (const ListedTensor& tensor : entry.tensors) {
            if (!stacked(tensor.name, "w13_weight_packed") || !entry.rank || tensor.shape.empty()) continue;
            const uint64_t count = tensor.shape[0];
            const uint64_t first = static_cast<uint64_t>(*entry.rank / (manifest.tp / manifest.ep)) * count;
            return std::to_string(first) + ":" + std::to_string(first + count);
        }
        return "0:0";
    }

    static void check_fused(const Header& header, const FusedTensor& view, const Path& file, std::set<std::string>& followers) {
        uint64_t position = view.offset;
        for (const std::string& member : view.members) {
            const auto found = std::find_if(header.tensors.begin(), header.tensors.end(),
                                            [&](const Tensor& tensor) { return tensor.name == member; });
            if (found == header.tensors.end() || found->offset != position || found->dtype != view.dtype) {
                throw Error(file, "the fused view " + view.name + " is not made of neighbours");
            }
            if (position != view.offset) followers.insert(member);
            position += found->size;
        }
        if (position - view.offset != view.size) throw Error(file, "the fused view " + view.name + " has another size");
    }

    static bool stacked(const std::string& name, const std::string& what) {
        const std::string end = ".mlp.experts." + what;
        return name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
    }

    const Tensor* find_stacked(const std::string& what) const {
        for (const Tensor& tensor : tensors()) {
            if (stacked(tensor.name, what)) return &tensor;
        }
        return nullptr;
    }

    void load_experts(const Manifest& manifest) {
        const Tensor *w13 = find_stacked("w13_weight_packed"), *s13 = find_stacked("w13_weight_scale");
        const Tensor *w2 = find_stacked("w2_weight_packed"), *s2 = find_stacked("w2_weight_scale");
        if (w13 == nullptr && s13 == nullptr && w2 == nullptr && s2 == nullptr) return;
        Experts experts;
        bool fits = w13 && s13 && w2 && s2 && w2->shape.size() == 3;
        if (fits) {
            experts.count = w2->shape[0];
            // Neither can overflow: both are less than the size of the file.
            experts.intermediate = 16 * w2->shape[1];
            experts.hidden = w2->shape[2] / 2;
            const uint64_t g = manifest.group_size;
            const auto groups = [g](uint64_t k) { return g == 0 || g >= k ? 1 : k / g; };
            const uint64_t E = experts.count, H = experts.hidden, I = experts.intermediate;
            fits = w13->shape == std::vector<uint64_t>{E, H / 16, 4 * I} && w2->shape == std::vector<uint64_t>{E, I / 16, 2 * H} &&
                   s13->shape == std::vector<uint64_t>{E, groups(H), 2 * I} && s2->shape == std::vector<uint64_t>{E, groups(I), H} &&
                   w13->dtype == Dtype::I32 && w2->dtype == Dtype::I32 && s13->dtype == Dtype::BF16 && s2->dtype == Dtype::BF16;
        }
        if (!fits) throw Error(file().path(), "its stacked experts do not fit each other");
        // The identity check has compared the range with these shapes.
        experts.first = std::stoull(header().metadata.at("expert_range"));
        experts.w13_packed = *w13;
        experts.w13_scale = *s13;
        experts.w2_packed = *w2;
        experts.w2_scale = *s2;
        experts_ = std::move(experts);
    }

    ShardEntry entry_;
    std::optional<Experts> experts_;
};

// ---------------------------------------------------------------------------------------------------------------------
// A rank, and the folder

class Rank {
  public:
    Rank(int number, std::vector<Shard> shards) : number_(number), shards_(std::move(shards)) {
        for (std::size_t i = 0; i < shards_.size(); ++i) {
            if (!by_unit_.emplace(shards_[i].entry().unit, i).second) {
                throw Error(shards_[i].file().path(), "is the second shard of its unit");
            }
            for (const Tensor& tensor : shards_[i].tensors()) {
                if (!tensor.is_filler() && !by_tensor_.emplace(tensor.name, i).second) {
                    throw Error(shards_[i].file().path(), "repeats the tensor " + tensor.name + " of another shard");
                }
            }
        }
    }

    int number() const { return number_; }
    const std::vector<Shard>& shards() const { return shards_; }
    const Shard& top() const { return unit("top"); }
    const Shard& layer(int number) const {
        const std::string digits = std::to_string(number);
        return unit("layer-" + std::string(digits.size() < 3 ? 3 - digits.size() : 0, '0') + digits);
    }
    const Tensor* find(const std::string& name) const {
        const auto found = by_tensor_.find(name);
        return found == by_tensor_.end() ? nullptr : shards_[found->second].find(name);
    }
    const Tensor& tensor(const std::string& name) const {
        if (const Tensor* found = find(name)) return *found;
        throw std::out_of_range("rank " + std::to_string(number_) + " has no tensor " + name);
    }

  private:
    const Shard& unit(const std::string& name) const {
        const auto found = by_unit_.find(name);
        if (found == by_unit_.end()) throw std::out_of_range("rank " + std::to_string(number_) + " has no " + name);
        return shards_[found->second];
    }

    int number_;
    std::vector<Shard> shards_;
    std::unordered_map<std::string, std::size_t> by_unit_, by_tensor_;
};

// A converted folder.
class Output {
  public:
    explicit Output(const Path& folder) : folder_(folder), manifest_(read_manifest(folder)) {}

    const Path& folder() const { return folder_; }
    const Manifest& manifest() const { return manifest_; }

    // All shards of a rank, checked and mapped; nothing of their data is read.
    Rank open_rank(int number) const {
        const std::vector<int>& ranks = manifest_.ranks;
        if (number >= manifest_.tp || std::find(ranks.begin(), ranks.end(), number) == ranks.end()) {
            throw Error(manifest_.path, "has no rank " + std::to_string(number));
        }
        Rank rank(number, open(number));
        if (rank.shards().empty()) throw Error(manifest_.path, "lists no shards of rank " + std::to_string(number));
        for (int layer : manifest_.layers) {
            try {
                rank.layer(layer);
            } catch (const std::out_of_range& error) {
                throw Error(manifest_.path, error.what());
            }
        }
        return rank;
    }

    // The tensors of which no rank owns a slice (vision tower, projector); may be empty.
    std::vector<Shard> open_common() const { return open(std::nullopt); }

  private:
    std::vector<Shard> open(std::optional<int> rank) const {
        std::vector<Shard> shards;
        for (const ShardEntry& entry : manifest_.shards) {
            if (entry.rank == rank) shards.emplace_back(manifest_, entry);
        }
        return shards;
    }

    Path folder_;
    Manifest manifest_;
};

}  // namespace marlin
