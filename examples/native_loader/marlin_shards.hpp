// Reads what `marlin-convert convert` writes: one rank's shards, mapped, checked and looked up by name.
//
// Header-only, with safetensors_file.hpp; needs C++17, POSIX and nlohmann/json. The format is described in
// schemas/README.md. Everything a file says is checked against its size and the manifest before it is mapped; what is
// wrong raises marlin::Error, which names the file. Digests are in marlin_digest.hpp.
//
//     marlin::Output out("k26-tp8");
//     marlin::Rank rank = out.open_rank(3);
//     const marlin::Experts& experts = *rank.layer(1).experts();
//     marlin::View<int32_t> words = experts.expert(17).w13_packed.view<int32_t>();
#pragma once

#include <set>

#include "safetensors_file.hpp"

namespace marlin {

constexpr int kFormatVersion = 1;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kMaxManifest = 64u << 20;  // that of Kimi-K2.6 has 2.5 MB at tp 8, 17 MB at tp 64
constexpr uint64_t kMaxListed = 256u << 20;   // any other file; its digests.bin has 94 MB at tp 64

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
    std::vector<FileEntry> files;

    // The shards of a rank, or of common/ for none.
    std::vector<ShardEntry> shards(std::optional<int> rank) const;

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

inline std::vector<ShardEntry> Manifest::shards(std::optional<int> rank) const {
    std::vector<ShardEntry> found;
    for (const Json& item : Fields(path, document, "the manifest").list("shards")) {
        const Fields fields(path, item, "a shard");
        const std::optional<int> owner = fields.has("rank") ? std::optional<int>(fields.small("rank")) : std::nullopt;
        if (owner == rank) found.push_back(parse_shard(path, item));
    }
    return found;
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
    top.list("shards");
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
        for (const ShardEntry& entry : manifest_.shards(rank)) shards.emplace_back(manifest_, entry);
        return shards;
    }

    Path folder_;
    Manifest manifest_;
};

}  // namespace marlin
