// Checks what marlin_shards.hpp reads against the digests of the manifest: xxh3-128 through xxHash's one header.
//
// Bytes may be the mapped ones or a copy, such as what came back from a GPU: a check names the first tensor, or expert of
// a stacked tensor, that differs.
#pragma once

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include <array>
#include <memory>

#include "marlin_shards.hpp"

namespace marlin {

using Digest = std::array<unsigned char, 16>;  // most significant byte first

inline Digest canonical(XXH128_hash_t hash) {
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, hash);
    Digest out;
    std::copy(std::begin(bytes.digest), std::end(bytes.digest), out.begin());
    return out;
}

inline Digest digest(const void* data, std::size_t size) { return canonical(XXH3_128bits(data, size)); }

inline std::string hex(const Digest& digest) {
    std::string out;
    for (unsigned char byte : digest) {
        out += "0123456789abcdef"[byte >> 4];
        out += "0123456789abcdef"[byte & 15];
    }
    return out;
}

// Digest of a file, read in pieces.
inline std::string file_digest(const File& file) {
    const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
    if (!state) throw std::bad_alloc();
    XXH3_128bits_reset(state.get());
    std::vector<char> piece(1 << 20);
    for (uint64_t at = 0; at < file.size(); at += piece.size()) {
        const std::size_t count = static_cast<std::size_t>(std::min<uint64_t>(piece.size(), file.size() - at));
        file.read(at, piece.data(), count);
        XXH3_128bits_update(state.get(), piece.data(), count);
    }
    return hex(canonical(XXH3_128bits_digest(state.get())));
}

inline void verify_file(const Output& out, const FileEntry& entry) {
    const File file(out.folder() / entry.path);
    if (file.size() != entry.size) throw Error(file.path(), "has another size than the manifest says");
    if (file_digest(file) != entry.digest) throw Error(file.path(), "its bytes do not match its digest");
}

// All files that are not shards.
// Of other ranks nothing is looked at: a machine that has this rank need not have their folders.
inline void verify_files(const Output& out, const Rank& rank) {
    const std::string& path = rank.shards().at(0).entry().path;
    const std::string own = path.substr(0, path.find('/') + 1);
    for (const FileEntry& entry : out.manifest().files) {
        const bool others = entry.path.rfind("rank-", 0) == 0 && entry.path.find('/') != std::string::npos &&
                            entry.path.rfind(own, 0) != 0;
        if (!others) verify_file(out, entry);
    }
}

// The manifest's own digest: of its bytes with zeros in the digest's place, which is the first key of that name.
inline void verify_manifest(const Output& out) {
    const File file(out.manifest().path);
    std::string text = file.read_all(kMaxManifest);
    const std::string claimed = Fields(file.path(), out.manifest().document, "the manifest").text("digest");
    const std::size_t key = text.find("\"digest\"");
    const std::size_t at = key == std::string::npos ? key : text.find('"' + claimed + '"', key);
    if (claimed.size() != 32 || at == std::string::npos) throw Error(file.path(), "has no digest of its own");
    text.replace(at + 1, claimed.size(), claimed.size(), '0');
    if (hex(digest(text.data(), text.size())) != claimed) throw Error(file.path(), "its bytes do not match its digest");
}

// digests.bin: one digest per expert of every stacked tensor.
class ExpertDigests {
  public:
    explicit ExpertDigests(const Output& out) : file_(out.folder() / "digests.bin") {
        for (const FileEntry& entry : out.manifest().files) {
            if (entry.path == "digests.bin") {
                verify_file(out, entry);
                bytes_ = file_.read_all(kMaxListed);
                return;
            }
        }
        throw Error(out.manifest().path, "does not list digests.bin");
    }

    // Of `count` experts from the offset `at`.
    std::string_view of(uint64_t at, uint64_t count) const {
        if (at > bytes_.size() || count > (bytes_.size() - at) / sizeof(Digest)) {
            throw Error(file_.path(), "is too short for an offset in the manifest");
        }
        return std::string_view(bytes_).substr(at, count * sizeof(Digest));
    }

  private:
    File file_;
    std::string bytes_;
};

// Digest of a tensor's bytes at `data`; raises Error at the first expert that is not as digests.bin says.
inline Digest tensor_digest(const Path& file, const Tensor& tensor, const ListedTensor& listed, const std::byte* data,
                            const ExpertDigests& experts) {
    if (!listed.experts) return digest(data, tensor.size);
    const uint64_t count = tensor.shape[0], size = tensor.size / count;
    const std::string_view expected = experts.of(*listed.experts, count);
    for (uint64_t i = 0; i < count; ++i) {
        const Digest found = digest(data + i * size, size);
        if (std::memcmp(found.data(), expected.data() + i * sizeof found, sizeof found) != 0) {
            throw Error(file, "local expert " + std::to_string(i) + " of " + tensor.name + " does not match its digest");
        }
    }
    return digest(expected.data(), expected.size());
}

// Every byte of a shard: its header in the file, and its data section at `data`, the mapped one by default.
inline void verify_shard(const Shard& shard, const ExpertDigests& experts, const std::byte* data = nullptr) {
    const Path& file = shard.file().path();
    if (data == nullptr) data = shard.data() + shard.data_start();
    std::string header(shard.data_start(), '\0');
    shard.file().read(0, header.data(), header.size());
    const Digest of_header = digest(header.data(), header.size());
    if (hex(of_header) != shard.entry().header) throw Error(file, "its header does not match its digest");
    std::string joined(of_header.begin(), of_header.end());
    for (std::size_t i = 0; i < shard.tensors().size(); ++i) {
        const Tensor& tensor = shard.tensors()[i];
        const ListedTensor& listed = shard.entry().tensors[i];
        const std::byte* bytes = data + (tensor.offset - shard.data_start());
        if (tensor.is_filler() && std::any_of(bytes, bytes + tensor.size, [](std::byte b) { return b != std::byte{0}; })) {
            throw Error(file, "the filler " + tensor.name + " is not zero");
        }
        const Digest found = tensor_digest(file, tensor, listed, bytes, experts);
        if (hex(found) != listed.digest) throw Error(file, tensor.name + " does not match its digest");
        joined.append(found.begin(), found.end());
    }
    if (hex(digest(joined.data(), joined.size())) != shard.entry().digest) {
        throw Error(file, "its digest does not follow from those of its tensors");
    }
}

}  // namespace marlin
