// What the products promise about rows: all of a group's are written, none beyond; what lies in
// pads and in other rows does not matter.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <string>

#include "gpu_test.h"
#include "product_groups.cuh"
#include "schedule/row_tiles.h"

namespace megamoe::testing {
namespace {

class ProductRows : public GpuTest {};

/// A bf16 matrix of rows that a product writes.
struct RowOutput {
  const DeviceBuffer<bf16>* buffer;
  int columns;
};

std::vector<RowOutput> row_outputs(const ProductData& d, const std::string& product) {
  if (product == "down" || product == "dx") return {{&d.out_NH, d.hidden}};
  if (product == "gate_up") return {{&d.out_NI, d.intermediate}};
  if (product == "gate_up_saving") {
    return {{&d.g_NI, d.intermediate}, {&d.u_NI, d.intermediate}, {&d.out_NI, d.intermediate}};
  }
  if (product == "p") {
    return {{&d.dg_out_NI, d.intermediate},
            {&d.du_out_NI, d.intermediate},
            {&d.out_NI, d.intermediate}};
  }
  return {};
}

__global__ void count_poison(const bf16* rows, int columns, const std::int32_t* begin,
                             const std::int32_t* count, unsigned long long* num_poisoned) {
  const int expert = static_cast<int>(blockIdx.x);
  const std::int64_t first = std::int64_t{begin[expert]} * columns;
  const std::int64_t end = first + std::int64_t{count[expert]} * columns;
  for (std::int64_t i = first + threadIdx.x; i < end; i += blockDim.x) {
    if (rows[i].bits == 0xffff) atomicAdd(num_poisoned, 1ULL);
  }
}

/// Values of the groups' rows that still hold the poison.
unsigned long long num_unwritten(const ProductData& data, const RowOutput& output) {
  const DeviceBuffer<unsigned long long> sum(1);
  check_cuda(cudaMemset(sum.data(), 0, 8), "memset");
  count_poison<<<data.num_experts, 256>>>(output.buffer->data(), output.columns, data.begin.data(),
                                          data.count.data(), sum.data());
  check_cuda(cudaDeviceSynchronize(), "count_poison");
  return sum.download()[0];
}

TEST_F(ProductRows, AllOfEveryGroupAreWritten) {
  std::vector<std::int32_t> counts(301);
  std::iota(counts.begin(), counts.end(), 0);
  ProductData data = make_data(320, 192, Groups(counts));
  for (const ProductCase& product : product_cases()) {
    for (const products::Sharing sharing : product.sharings) {
      SCOPED_TRACE(::testing::Message()
                   << product.name << ", sharing " << static_cast<int>(sharing));
      products::LaunchOptions options;
      options.sharing = sharing;
      data.poison_outputs();
      product.launch(data, options);
      for (const RowOutput& output : row_outputs(data, product.name))
        EXPECT_EQ(num_unwritten(data, output), 0U);
    }
  }
}

TEST_F(ProductRows, SavedGateAndUpAreAccurate) {
  ProductData data = make_data(320, 192, Groups({130, 0, 1, 65, 300, 16}));
  for (const ProductCase& product : product_cases()) {
    if (product.name != "gate_up_saving") continue;
    for (const products::Sharing sharing : product.sharings) {
      products::LaunchOptions options;
      options.sharing = sharing;
      data.poison_outputs();
      product.launch(data, options);
      for (const auto& [saved, weights] :
           {std::pair{&data.g_NI, &data.gate_eIH}, {&data.u_NI, &data.up_eIH}}) {
        const double error = sampled_error<SampledProduct::down>(
            data, {data.activation,
                   0,
                   {{data.x_NH.data(), data.hidden, 1}, {}},
                   {{weights->data(), data.hidden, 1}, {}},
                   std::int64_t{data.hidden} * data.intermediate,
                   saved->data(),
                   data.intermediate,
                   data.hidden});
        EXPECT_LT(error, kBf16Tolerance) << (saved == &data.g_NI ? "g" : "u");
      }
    }
  }
}

TEST_F(ProductRows, BeyondAGroupsPaddingAreNotTouched) {
  // One row in an expert: rows 16..63 of its 64 must keep their poison in every row output.
  ProductData data = make_data(256, 128, Groups({1, 1}));
  for (const ProductCase& product : product_cases()) {
    data.poison_outputs();
    product.launch(data, {});
    for (const RowOutput& output : row_outputs(data, product.name)) {
      const std::vector<bf16> values = output.buffer->download();
      for (std::int64_t i = std::int64_t{16} * output.columns;
           i < std::int64_t{64} * output.columns; ++i) {
        ASSERT_EQ(values[i].bits, 0xffff) << product.name << " element " << i;
      }
    }
  }
}

/// NaN in what follows each group's rows, from the next multiple of `multiple` rows to the end of
/// its last 64.
void poison_pads(const DeviceBuffer<bf16>& rows, int columns, const Groups& groups, int multiple) {
  for (std::size_t expert = 0; expert < groups.count.size(); ++expert) {
    const std::int64_t count = groups.count[expert];
    const std::int64_t first = (count + multiple - 1) / multiple * multiple;
    const std::int64_t num_rows = (count + 63) / 64 * 64 - first;
    check_cuda(cudaMemset(rows.data() + (groups.begin[expert] + first) * columns, 0xff,
                          static_cast<std::size_t>(num_rows * columns) * sizeof(bf16)),
               "poison pads");
  }
}

TEST_F(ProductRows, NanInPadsDoesNotMatter) {
  const Groups groups({130, 0, 1, 65, 300, 16, 63, 64, 193});
  ProductData data = make_data(320, 192, groups);
  for (const auto& [rows, columns] : data.row_operands()) poison_pads(*rows, columns, groups, 1);
  for (const ProductCase& product : product_cases())
    if (!is_weight_gradient(product)) expect_accurate(data, product);
}

TEST_F(ProductRows, WeightGradientsReadZeroPadsOnlyToTheNextSixteen) {
  const Groups groups({130, 0, 1, 65, 300, 16, 63, 64, 193});
  ProductData data = make_data(320, 192, groups);
  for (const auto& [rows, columns] : data.row_operands()) {
    poison_pads(*rows, columns, groups, schedule::kRowsPerUnit);
  }
  for (const ProductCase& product : product_cases())
    if (is_weight_gradient(product)) expect_accurate(data, product);
}

template <class T>
std::int64_t num_different(const DeviceBuffer<T>& a, std::int64_t a_first, const DeviceBuffer<T>& b,
                           std::int64_t b_first, std::int64_t size) {
  const std::vector<T> mine = a.download();
  const std::vector<T> other = b.download();
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < size; ++i)
    different += std::memcmp(&mine[a_first + i], &other[b_first + i], sizeof(T)) != 0 ? 1 : 0;
  return different;
}

/// The first 100 rows of the first expert, alone in `small`, with others in `large`.
void expect_same_first_rows(ProductData& small, ProductData& large, const ProductCase& product) {
  constexpr std::int64_t kRows = 100;
  for (ProductData* data : {&small, &large}) {
    data->poison_outputs();
    product.launch(*data, {});
  }
  const std::vector<RowOutput> mine = row_outputs(small, product.name);
  const std::vector<RowOutput> other = row_outputs(large, product.name);
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_EQ(num_different(*mine[i].buffer, 0, *other[i].buffer, 0, kRows * mine[i].columns), 0)
        << product.name << ", output " << i;
  }
  if (product.name != "p") return;
  for (int segment = 0; segment < small.intermediate / 64; ++segment) {
    EXPECT_EQ(num_different(small.dw_segments, segment * small.capacity, large.dw_segments,
                            segment * large.capacity, kRows),
              0)
        << "dw, segment " << segment;
  }
}

TEST_F(ProductRows, BitsDoNotDependOnNeighbours) {
  // 300 rows of one expert are two tiles of 160 and 144; of 192 one.
  ProductData alone = make_data(640, 320, Groups({100}));
  for (const Groups& groups :
       {Groups({300}), Groups({192}), Groups({101, 40}), Groups({100, 700})}) {
    ProductData crowd = make_data(640, 320, groups);
    for (const ProductCase& product : product_cases())
      if (!is_weight_gradient(product)) expect_same_first_rows(alone, crowd, product);
  }
}

TEST_F(ProductRows, AnExpertsWeightGradientsDoNotDependOnOtherExperts) {
  ProductData alone = make_data(640, 320, Groups({100}));
  ProductData crowd = make_data(640, 320, Groups({100, 700, 0, 3}));
  const std::int64_t size = std::int64_t{640} * 320;
  for (const ProductCase& product : product_cases()) {
    if (!is_weight_gradient(product)) continue;
    for (ProductData* data : {&alone, &crowd}) {
      data->poison_outputs();
      product.launch(*data, {});
    }
    for (int job = 0; job < 3; ++job) {
      const std::int64_t first = job * crowd.num_experts * size;
      EXPECT_EQ(product.name.starts_with("dw_bf16")
                    ? num_different(alone.gradients, job * size, crowd.gradients, first, size)
                    : num_different(*alone.main_grad, job * size, *crowd.main_grad, first, size),
                0)
          << product.name << ", job " << job;
    }
  }
}

TEST_F(ProductRows, ShapesOfPublishedModelsAreAccurate) {
  struct Model {
    const char* name;
    int hidden;
    int intermediate;
    int num_experts;
  };
  for (const Model& model : {Model{"mixtral", 4096, 14336, 8},
                             {"qwen2-57b", 3584, 2560, 64},
                             {"qwen1.5-moe", 2048, 1408, 60}}) {
    SCOPED_TRACE(model.name);
    std::vector<std::int32_t> counts;
    for (int expert = 0; expert < model.num_experts; ++expert)
      counts.push_back(expert == 3 ? 0 : static_cast<std::int32_t>(hash(expert) % 400));
    ProductData data = make_data(model.hidden, model.intermediate, Groups(counts));
    expect_accurate(data);
  }
}

}  // namespace
}  // namespace megamoe::testing
