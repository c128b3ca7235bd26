/// A grid of ranks, with a group for every line along every dimension (torch.distributed.device_mesh).
///
/// What lives in `mesh/`: DeviceMesh and init_device_mesh, on top of `split_group` of the default group. `muster/device_mesh.h` is its
/// public door. May include group/ and what stands below it. Test it alone: `ctest -R '^mesh'`.
///
/// Values of a mesh are ranks of the default group. For [[0, 1, 2, 3], [4, 5, 6, 7]] the groups along dimension 0 are (0, 4) to (3, 7),
/// those along dimension 1 the rows. All ranks of the default group call what makes groups (the constructor, init_device_mesh, flatten),
/// those that are not in the mesh too. All groups along one dimension cost one agreement. What ranks pass differently, or pass wrong,
/// throws DistError on every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "muster/group/pg_options.h"
#include "muster/group/process_group.h"

namespace muster {

/// An array of ranks: an integer tensor of any shape, or nested lists, as in `{{0, 1}, {2, 3}}`. All lists of one level must be of one
/// length.
class MeshRanks {
 public:
  MeshRanks(const at::Tensor& ranks);
  MeshRanks(std::initializer_list<MeshRanks> parts);
  MeshRanks(const std::vector<int>& ranks);
  MeshRanks(const std::vector<std::vector<int>>& rows);
  MeshRanks(int rank) : values_{rank} {}
  MeshRanks(std::vector<int> values, std::vector<int> shape) : values_(std::move(values)), shape_(std::move(shape)) {}

  const std::vector<int>& values() const { return values_; }  ///< in row-major order
  const std::vector<int>& shape() const { return shape_; }
  /// What is wrong with it, if anything: found when it was made, thrown by who uses it, so that all ranks learn of it.
  const std::string& trouble() const { return trouble_; }

 private:
  std::vector<int> values_;
  std::vector<int> shape_;
  std::string trouble_;
};

/// What the groups along one dimension run on, where that is not what the default group runs on. A dimension that has neither keeps it.
struct DimensionBackend {
  std::optional<std::string> backend = {};                    ///< as `NewGroupOptions::backend`
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;  ///< as in init_process_group
};

struct DeviceMeshOptions {
  std::vector<std::string> mesh_dim_names = {};         ///< one per dimension, all different; or none
  bool _init_process_groups = true;                     ///< false: a layout without groups; nobody is talked to
  std::vector<DimensionBackend> backend_override = {};  ///< one per dimension; or none. Such groups cost an agreement each
};

/// Immutable; copies share everything. Its groups are of the default group and end with it. Thread-safe, except that what makes groups is
/// called by all ranks in one order.
class DeviceMesh {
 public:
  DeviceMesh(const std::string& device_type, const MeshRanks& mesh, const DeviceMeshOptions& options = {});

  /// A mesh on groups that are there: groups[i] is this process's along dimension i. Talks to nobody. Throws where a group's members are
  /// not those of this process's line. `mesh` may be left out for one group: its ranks in their order.
  static DeviceMesh from_groups(const std::vector<Group>& groups, const std::string& device_type, const std::optional<MeshRanks>& mesh = {},
                                const std::vector<std::string>& mesh_dim_names = {});

  const std::string& device_type() const;
  /// The ranks, as an int64 tensor.
  at::Tensor mesh() const;
  int ndim() const;
  std::vector<std::int64_t> shape() const;
  /// Of one dimension; of all together where none is given.
  std::int64_t size(std::optional<int> mesh_dim = {}) const;
  /// Empty where it has no names.
  const std::vector<std::string>& mesh_dim_names() const;

  /// A dimension by number or name; left out: the only one of a mesh that has one.
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
  /// The group of the line along a dimension on which this process stands.
  Group get_group(const Dimension& mesh_dim = {}) const;
  std::vector<Group> get_all_groups() const;
  /// This process's rank in the default group.
  int get_rank() const;
  /// Its position along a dimension. Throws where it is not in the mesh.
  int get_local_rank(const Dimension& mesh_dim = {}) const;
  /// Its position along each dimension; absent where it is not in the mesh.
  std::optional<std::vector<int>> get_coordinate() const;

  /// The part of the mesh along the named dimensions on which this process stands, with those in the order given; where
  /// it is not in the mesh, the first part. Names of flattened parts count too. Talks to nobody.
  DeviceMesh slice(const std::vector<std::string>& names) const;
  DeviceMesh operator[](const std::string& name) const { return slice({name}); }
  DeviceMesh operator[](std::initializer_list<std::string> names) const { return slice(names); }
  /// All dimensions as one, with a group of its own, named `mesh_dim_name` or, left out, by its dimensions' names joined with '_'. All
  /// ranks call it on their own slices of the same mesh.
  DeviceMesh flatten(const std::optional<std::string>& mesh_dim_name = {}) const;

  /// Makes a mesh the calling thread's current one while it lives. Scopes nest.
  class Scope {
   public:
    explicit Scope(const DeviceMesh& mesh);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };
  /// Throws where the thread is in no scope.
  static DeviceMesh current();

  /// The same ranks in the same layout, with the same names, on the same kind of device.
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);

 private:
  struct State;
  static std::shared_ptr<State> lay_out(const std::string& device_type, const MeshRanks& mesh, const DeviceMeshOptions& options);
  explicit DeviceMesh(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  int number_of(const Dimension& dimension, std::string_view caller) const;

  std::shared_ptr<const State> state_;
};

struct InitDeviceMeshOptions {
  std::vector<std::string> mesh_dim_names = {};
  std::vector<DimensionBackend> backend_override = {};  ///< as in DeviceMeshOptions
};
/// A mesh of all ranks in order, of the shape given: its product is the world size. Makes the default group (from env://) where there is
/// none. Blocks until all ranks have called it.
DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<int>& mesh_shape, const InitDeviceMeshOptions& options = {});

}  // namespace muster
