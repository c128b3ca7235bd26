// SPDX-License-Identifier: BSD-3-Clause
/// A grid of ranks, with a process group for every line along every dimension
/// (torch.distributed.device_mesh), and tensors that are divided over such groups.
///
/// `mesh/` holds DeviceMesh and init_device_mesh, built on `split_group` of the default group, and
/// ShardedTensor. Users include `muster/device_mesh.h`. It may include group/ and the layers below.
/// Its tests: `ctest -R '^mesh'`.
///
/// The values of a mesh are ranks of the default group. For [[0, 1, 2, 3], [4, 5, 6, 7]], the
/// groups along dimension 0 are (0, 4) to (3, 7); those along dimension 1 are the rows. Functions
/// that create groups (the constructor, init_device_mesh, flatten, unflatten) are called by all
/// ranks of the default group, including those outside the mesh. All groups along one dimension
/// take one round of agreement. Invalid or mismatched arguments throw DistError on every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "muster/backend_name.h"
#include "muster/process_group.h"

namespace muster {

/// An array of ranks: an integer tensor of any shape, or nested lists such as `{{0, 1}, {2, 3}}`.
/// All lists of one level must have the same length.
class MeshRanks {
 public:
  MeshRanks(const at::Tensor& ranks);
  MeshRanks(std::initializer_list<MeshRanks> parts);
  MeshRanks(const std::vector<int>& ranks);
  MeshRanks(const std::vector<std::vector<int>>& rows);
  MeshRanks(int rank) : values_{rank} {}
  MeshRanks(std::vector<int> values, std::vector<int> shape)
      : values_(std::move(values)), shape_(std::move(shape)) {}

  const std::vector<int>& values() const { return values_; }  ///< in row-major order
  const std::vector<int>& shape() const { return shape_; }
  /// The fault of the array; empty if there is none. Found at construction and thrown by the
  /// function that uses the array, so that all ranks learn of it.
  const std::string& trouble() const { return trouble_; }

 private:
  std::vector<int> values_;
  std::vector<int> shape_;
  std::string trouble_;
};

/// Backend and options of the groups along one dimension. A dimension with neither uses the default
/// group's.
struct DimensionBackend {
  std::optional<std::string> backend = {};                    ///< as `NewGroupOptions::backend`
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;  ///< as in init_process_group
};

struct DeviceMeshOptions {
  std::vector<std::string> mesh_dim_names = {};  ///< one per dimension, all different; or none
  bool _init_process_groups = true;  ///< false: a layout without groups or communication
  /// One per dimension, or none. Each such group takes its own round of agreement.
  std::vector<DimensionBackend> backend_override = {};
  /// True: group ranks follow the mesh's order. False: they are sorted, as in new_group, and the
  /// default group is used for every dimension that covers all ranks.
  bool preserve_rank_order = false;
  /// This process's rank, for a layout without groups. Default: its rank in the default group.
  std::optional<int> _rank = {};
};

/// A mesh's identity as plain values. Groups are identified by name.
struct DeviceMeshDescription {
  struct Part {
    std::vector<std::vector<int>> axes;  ///< as mesh::MeshAxis: offsets in `ranks`
    std::vector<std::string> names;
    std::vector<std::string> group_names;  ///< this process's group along each axis, or empty
  };
  std::string device_type;
  std::vector<int> ranks;  ///< of the root mesh, in row-major order
  bool preserve_rank_order = false;
  int rank = -1;
  Part root;
  std::map<std::string, Part> flattened;  ///< flattened parts of the root mesh, by name
  Part part;                              ///< this mesh
};

/// Immutable, except that `flatten` adds to the root mesh; copies share all state. Its groups are
/// made from the default group and end with it. Thread-safe, except that all ranks must call
/// functions that create groups in the same order.
///
/// Slices, flattened meshes and unflattened meshes refer to their root mesh, the one constructed
/// from ranks.
class DeviceMesh {
 public:
  DeviceMesh(const std::string& device_type, const MeshRanks& mesh,
             const DeviceMeshOptions& options = {});

  /// A mesh on existing groups; groups[i] is this process's group along dimension i. No
  /// communication. Throws if a group's members differ from the mesh line through this process.
  /// With one group, `mesh` may be omitted; it is then the group's ranks in order.
  static DeviceMesh from_groups(const std::vector<Group>& groups, const std::string& device_type,
                                const std::optional<MeshRanks>& mesh = {},
                                const std::vector<std::string>& mesh_dim_names = {});

  const std::string& device_type() const;
  /// The ranks, as an int32 tensor.
  at::Tensor mesh() const;
  int ndim() const;
  std::vector<std::int64_t> shape() const;
  /// Size of one dimension (negative: counted from the last), or of the whole mesh if none is
  /// given.
  std::int64_t size(std::optional<int> mesh_dim = {}) const;
  /// Empty if the dimensions have no names.
  const std::vector<std::string>& mesh_dim_names() const;
  bool preserve_rank_order() const;

  /// A dimension by number (negative: counted from the last) or by name; the default is the only
  /// dimension of a one-dimensional mesh. The functions below also accept names of flattened parts
  /// of the root mesh.
  class Dimension {
   public:
    Dimension() = default;
    Dimension(int number) : which_(number) {}
    Dimension(const char* name) : which_(std::string(name)) {}
    Dimension(std::string name) : which_(std::move(name)) {}

   private:
    friend class DeviceMesh;
    std::variant<std::monostate, int, std::string> which_;
  };
  /// The group of the line along a dimension that contains this process.
  Group get_group(const Dimension& mesh_dim = {}) const;
  std::vector<Group> get_all_groups() const;
  /// This process's rank in the default group.
  int get_rank() const;
  /// This process's rank in the group along a dimension; in a mesh without groups, its position.
  /// Throws if the process is not in the mesh.
  int get_local_rank(const Dimension& mesh_dim = {}) const;
  /// This process's position along each dimension; empty if it is not in the mesh.
  std::optional<std::vector<int>> get_coordinate() const;

  /// The sub-mesh along the named dimensions, in the given order, that contains this process; the
  /// first one if the process is not in the mesh. On the root mesh, names of flattened parts are
  /// accepted too. No communication.
  DeviceMesh slice(const std::vector<std::string>& names) const;
  DeviceMesh operator[](const std::string& name) const { return slice({name}); }
  DeviceMesh operator[](std::initializer_list<std::string> names) const { return slice(names); }
  /// Merges all dimensions into one, with its own group, named `mesh_dim_name` or, by default, the
  /// dimensions' names joined with '_'. All ranks call it on their own slices of the same mesh. The
  /// root mesh caches it: a repeated call returns the same mesh, and a name already used for other
  /// dimensions throws.
  DeviceMesh flatten(const std::optional<std::string>& mesh_dim_name = {},
                     const DimensionBackend& backend_override = {}) const;
  /// Splits one dimension in row-major order into several with these sizes and names, each with its
  /// own groups. All ranks call it. backend_override has one entry per new dimension, or none.
  DeviceMesh unflatten(const Dimension& dim, const std::vector<int>& mesh_sizes,
                       const std::vector<std::string>& mesh_dim_names,
                       const std::vector<DimensionBackend>& backend_override = {}) const;
  /// Combines the dimensions of several parts of one root mesh into one mesh, on their groups. No
  /// communication.
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);
  /// All lines along a dimension as one-dimensional meshes. The one that contains this process has
  /// a group.
  std::vector<DeviceMesh> lines(const std::string& mesh_dim_name) const;
  DeviceMesh root() const;
  /// Meshes made by `flatten` on the root mesh, by name.
  std::map<std::string, DeviceMesh> flattened() const;

  /// Aborts the groups of all dimensions and all flattened parts (abort_process_group). Throws on a
  /// mesh that is not its own root.
  void abort() const;

  DeviceMeshDescription describe() const;
  /// Recreates a described mesh for this process's rank in the default group or, without one, for
  /// the described rank. It uses groups by name if this process has all of them, otherwise none.
  static DeviceMesh from_description(const DeviceMeshDescription& description);

  /// Makes a mesh the calling thread's current one during its lifetime. Scopes nest.
  class Scope {
   public:
    explicit Scope(const DeviceMesh& mesh);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };
  /// The innermost scope's mesh; throws if the thread is in no scope.
  static DeviceMesh current();

  /// Equal if they are the same dimensions of root meshes with equal ranks, names, device type and
  /// group rank order.
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);

 private:
  struct Part;
  struct Root;
  DeviceMesh(std::shared_ptr<Root> root, std::shared_ptr<const Part> part)
      : root_(std::move(root)), part_(std::move(part)) {}
  std::size_t number_of(int number, std::string_view caller) const;
  std::size_t number_of(const std::string& name, std::string_view caller) const;
  std::pair<std::shared_ptr<const Part>, std::size_t> find(const Dimension& dimension,
                                                           std::string_view caller) const;

  std::shared_ptr<Root> root_;
  std::shared_ptr<const Part> part_;
};

struct InitDeviceMeshOptions {
  std::vector<std::string> mesh_dim_names = {};
  std::vector<DimensionBackend> backend_override = {};  ///< as in DeviceMeshOptions
};
/// A mesh of all ranks in order. The product of `mesh_shape` must be the world size. Initialises
/// the default group (from env://) if there is none. Blocks until all ranks have called it.
DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<int>& mesh_shape,
                            const InitDeviceMeshOptions& options = {});

/// How a tensor lies along one dimension of a mesh (torch.distributed.tensor).
class Placement {
 public:
  /// Divided along its dimension `dim`, as torch.chunk does: the last ranks may hold less, or none.
  static Placement shard(std::int64_t dim) { return Placement(PlacementKind::shard, dim); }
  /// Equal on all ranks.
  static Placement replicate() { return Placement(PlacementKind::replicate, 0); }
  /// The sum of the ranks' tensors.
  static Placement partial() { return Placement(PlacementKind::partial, 0); }

  bool is_shard() const { return kind_ == PlacementKind::shard; }
  bool is_replicate() const { return kind_ == PlacementKind::replicate; }
  bool is_partial() const { return kind_ == PlacementKind::partial; }
  std::int64_t dim() const { return dim_; }  ///< of shard()
  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  enum class PlacementKind { shard, replicate, partial };
  Placement(PlacementKind kind, std::int64_t dim) : kind_(kind), dim_(dim) {}
  PlacementKind kind_;
  std::int64_t dim_;
};

/// This rank's part of a tensor that is divided over groups of ranks: a box of the whole. A value;
/// copies share the local tensor. With one group per dimension of a mesh, and a placement for each;
/// a tensor's dimension that several of them divide is divided by the first, and its parts by the
/// next.
class ShardedTensor {
 public:
  /// Throws DistError if `local` has not the sizes that this rank's part has.
  ShardedTensor(at::Tensor local, std::vector<std::int64_t> sizes, std::vector<Group> groups,
                std::vector<Placement> placements);
  ShardedTensor(at::Tensor local, std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                std::vector<Placement> placements)
      : ShardedTensor(std::move(local), std::move(sizes), mesh.get_all_groups(),
                      std::move(placements)) {}
  /// A copy of this rank's part of `whole`, which all ranks have alike. No communication. Not for
  /// partial().
  static ShardedTensor distribute(const at::Tensor& whole, const std::vector<Group>& groups,
                                  const std::vector<Placement>& placements);

  const at::Tensor& local() const { return local_; }
  const std::vector<std::int64_t>& sizes() const { return sizes_; }  ///< of the whole
  /// Of the local tensor's first element.
  const std::vector<std::int64_t>& offsets() const { return offsets_; }
  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<Placement>& placements() const { return placements_; }
  /// Another tensor that is divided alike, such as the gradient or an optimizer's state.
  ShardedTensor like(at::Tensor local) const {
    return ShardedTensor(std::move(local), sizes_, groups_, placements_);
  }
  /// Collective. The whole tensor, on every rank.
  at::Tensor full() const;

 private:
  at::Tensor local_;
  std::vector<std::int64_t> sizes_, offsets_;
  std::vector<Group> groups_;
  std::vector<Placement> placements_;
};

/// Collective. The norm of all tensors together, each element of which counts once, as
/// torch.nn.utils.get_total_norm. All ranks get the same number, bit for bit. `norm_type` is
/// infinity or more than 0. Throws DistError for partial(), and on every rank if the tensors do not
/// all lie on the same ranks.
double get_total_norm(const std::vector<ShardedTensor>& tensors, double norm_type = 2);
/// Collective. Scales gradients so that their norm is at most `max_norm`, and returns it as it was.
double clip_grad_norm_(const std::vector<ShardedTensor>& gradients, double max_norm,
                       double norm_type = 2);

/// The box of a whole tensor that a parameter holds on this rank, and the ranks that hold the
/// others.
struct TensorParallelPart {
  std::vector<std::int64_t> sizes;    ///< of the whole tensor
  std::vector<std::int64_t> offsets;  ///< of the parameter's first element
  Group group = nullptr;  ///< null: not known, and norms over such parameters are refused
};
/// None for a parameter that is whole. checkpoint::State reads it, for parameters and for their
/// optimizer's state: a checkpoint loads with any number of ranks, and into torch::nn modules. So
/// does FullyShardedDataParallel::clip_grad_norm_(). `group` is null once its group has ended.
std::optional<TensorParallelPart> tensor_parallel_part(const at::Tensor& parameter);
/// Declares a parameter of a layer of your own as such a part. It holds for this tensor, also after
/// Module::to(), and ends with it. Throws DistError if the parameter is not within the whole.
/// Thread-safe, as is tensor_parallel_part().
void set_tensor_parallel_part(const at::Tensor& parameter, TensorParallelPart part);

}  // namespace muster
