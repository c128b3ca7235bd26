/// A grid of ranks, with a group for every line along every dimension
/// (torch.distributed.device_mesh).
///
/// What lives in `mesh/`: DeviceMesh and init_device_mesh, on top of `split_group` of the default
/// group. `muster/device_mesh.h` is its public door. May include group/ and what stands below it.
/// Test it alone: `ctest -R '^mesh'`.
///
/// Values of a mesh are ranks of the default group. For [[0, 1, 2, 3], [4, 5, 6, 7]] the groups
/// along dimension 0 are (0, 4) to (3, 7), those along dimension 1 the rows. All ranks of the
/// default group call what makes groups (the constructor, init_device_mesh, flatten, unflatten),
/// those that are not in the mesh too. All groups along one dimension cost one agreement. What
/// ranks pass differently, or pass wrong, throws DistError on every rank.
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

#include "muster/group/pg_options.h"
#include "muster/group/process_group.h"

namespace muster {

/// An array of ranks: an integer tensor of any shape, or nested lists, as in `{{0, 1}, {2, 3}}`.
/// All lists of one level must be of one length.
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
  /// What is wrong with it, if anything: found when it was made, thrown by who uses it, so that all
  /// ranks learn of it.
  const std::string& trouble() const { return trouble_; }

 private:
  std::vector<int> values_;
  std::vector<int> shape_;
  std::string trouble_;
};

/// What the groups along one dimension run on, where that is not what the default group runs on. A
/// dimension that has neither keeps it.
struct DimensionBackend {
  std::optional<std::string> backend = {};                    ///< as `NewGroupOptions::backend`
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;  ///< as in init_process_group
};

struct DeviceMeshOptions {
  std::vector<std::string> mesh_dim_names = {};  ///< one per dimension, all different; or none
  bool _init_process_groups = true;  ///< false: a layout without groups; nobody is talked to
  std::vector<DimensionBackend> backend_override =
      {};  ///< one per dimension; or none. Such groups cost an agreement each
  /// Groups keep the order of the mesh's ranks. False: they are sorted, as new_group sorts them,
  /// and the default group serves for every dimension of all ranks.
  bool preserve_rank_order = false;
  /// This process's rank, for a layout without groups; absent: that in the default group.
  std::optional<int> _rank = {};
};

/// All that makes a mesh equal to another, as plain values. Groups are known by name.
struct DeviceMeshDescription {
  struct Part {
    std::vector<std::vector<int>> axes;  ///< as mesh::MeshAxis, in the list `ranks`
    std::vector<std::string> names;
    std::vector<std::string> group_names;  ///< this process's group along each axis; or none
  };
  std::string device_type;
  std::vector<int> ranks;  ///< of the root mesh, in row-major order
  bool preserve_rank_order = false;
  int rank = -1;
  Part root;
  std::map<std::string, Part> flattened;  ///< of the root mesh, by name
  Part part;                              ///< the mesh itself
};

/// Immutable, but for what `flatten` adds to its root mesh; copies share everything. Its groups are
/// of the default group and end with it. Thread-safe, except that what makes groups is called by
/// all ranks in one order.
///
/// Slices, flattened and unflattened meshes know their root mesh: the one that was made of ranks.
class DeviceMesh {
 public:
  DeviceMesh(const std::string& device_type, const MeshRanks& mesh,
             const DeviceMeshOptions& options = {});

  /// A mesh on groups that are there: groups[i] is this process's along dimension i. Talks to
  /// nobody. Throws where a group's members are not those of this process's line. `mesh` may be
  /// left out for one group: its ranks in their order.
  static DeviceMesh from_groups(const std::vector<Group>& groups, const std::string& device_type,
                                const std::optional<MeshRanks>& mesh = {},
                                const std::vector<std::string>& mesh_dim_names = {});

  const std::string& device_type() const;
  /// The ranks, as an int32 tensor.
  at::Tensor mesh() const;
  int ndim() const;
  std::vector<std::int64_t> shape() const;
  /// Of one dimension (below 0: counted from the last); of all together where none is given.
  std::int64_t size(std::optional<int> mesh_dim = {}) const;
  /// Empty where it has no names.
  const std::vector<std::string>& mesh_dim_names() const;
  bool preserve_rank_order() const;

  /// A dimension by number (below 0: counted from the last) or name; left out: the only one of a
  /// mesh that has one. Names of flattened parts of the root mesh are dimensions too, in the calls
  /// below.
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
  /// Its rank in the group along a dimension; in a mesh without groups its position. Throws where
  /// it is not in the mesh.
  int get_local_rank(const Dimension& mesh_dim = {}) const;
  /// Its position along each dimension; absent where it is not in the mesh.
  std::optional<std::vector<int>> get_coordinate() const;

  /// The part of the mesh along the named dimensions on which this process stands, with those in
  /// the order given; where it is not in the mesh, the first part. Names of flattened parts count
  /// too on the root mesh. Talks to nobody.
  DeviceMesh slice(const std::vector<std::string>& names) const;
  DeviceMesh operator[](const std::string& name) const { return slice({name}); }
  DeviceMesh operator[](std::initializer_list<std::string> names) const { return slice(names); }
  /// All dimensions as one, with a group of its own, named `mesh_dim_name` or, left out, by its
  /// dimensions' names joined with '_'. All ranks call it on their own slices of the same mesh. The
  /// root mesh keeps it: a second call gives the same, for other dimensions under a name that is
  /// taken it throws.
  DeviceMesh flatten(const std::optional<std::string>& mesh_dim_name = {},
                     const DimensionBackend& backend_override = {}) const;
  /// One dimension as several, in rows, of these sizes and names, each with groups of its own. All
  /// ranks call it. backend_override: one per new dimension; or none.
  DeviceMesh unflatten(const Dimension& dim, const std::vector<int>& mesh_sizes,
                       const std::vector<std::string>& mesh_dim_names,
                       const std::vector<DimensionBackend>& backend_override = {}) const;
  /// The dimensions of several parts of one root mesh as one mesh, on their groups. Talks to
  /// nobody.
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);
  /// All lines along a dimension, each as a mesh of its own; with a group that on which this
  /// process stands.
  std::vector<DeviceMesh> lines(const std::string& mesh_dim_name) const;
  DeviceMesh root() const;
  /// What `flatten` has made of the root mesh, by name.
  std::map<std::string, DeviceMesh> flattened() const;

  /// Aborts the groups of all dimensions and of all flattened parts (abort_process_group). Throws
  /// on a mesh that is not its own root.
  void abort() const;

  DeviceMeshDescription describe() const;
  /// The mesh that was described, for this process's rank in the default group or, without one, the
  /// described rank. It has the groups of those names where this process has all of them, else
  /// none.
  static DeviceMesh from_description(const DeviceMeshDescription& description);

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

  /// The same dimensions of root meshes of the same ranks, with the same names, on the same kind of
  /// device, with groups in the same order.
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
/// A mesh of all ranks in order, of the shape given: its product is the world size. Makes the
/// default group (from env://) where there is none. Blocks until all ranks have called it.
DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<int>& mesh_shape,
                            const InitDeviceMeshOptions& options = {});

}  // namespace muster
