// The products against an fp64 reference, and their promises: bits do not depend on neighbours,
// tiles, SMs or repetition.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "bit_hash.cuh"
#include "gpu_test.h"
#include "megamoe/error.h"
#include "product_groups.cuh"

namespace megamoe::testing {
namespace {

using products::GradientMode;
using products::LaunchOptions;
using products::Sharing;

class Products : public GpuTest {};

TEST_F(Products, EverySizeOfGroupFrom0To300) {
  std::vector<std::int32_t> counts(301);
  std::iota(counts.begin(), counts.end(), 0);
  std::shuffle(counts.begin(), counts.end(), std::mt19937(7));
  ProductData data = make_data(256, 192, Groups(counts));
  expect_accurate(data);
}

TEST_F(Products, OddShapesInMultiplesOf64) {
  for (const auto& [hidden, intermediate] :
       {std::pair{64, 64}, {320, 704}, {2880, 1408}, {1088, 192}}) {
    SCOPED_TRACE(::testing::Message() << "H " << hidden << ", I " << intermediate);
    ProductData data = make_data(hidden, intermediate, Groups({130, 0, 1, 65, 300, 16, 0}));
    expect_accurate(data);
  }
}

TEST_F(Products, LargeGroups) {
  ProductData data = make_data(512, 384, Groups({3000, 17, 1025}));
  expect_accurate(data);
}

/// Bits of all outputs of one product.
unsigned long long output_bits(ProductData& data, const ProductCase& product,
                               const LaunchOptions& options) {
  DeviceBuffer<unsigned long long> sum(1);
  check_cuda(cudaMemset(sum.data(), 0, 8), "memset");
  data.poison_outputs();
  product.launch(data, options);
  for (const DeviceBuffer<bf16>* buffer : {&data.out_NH, &data.out_NI, &data.g_NI, &data.u_NI,
                                           &data.dg_out_NI, &data.du_out_NI, &data.gradients}) {
    add_bit_hash(buffer->data(), buffer->size() * 2, sum.data());
  }
  add_bit_hash(data.dw_segments.data(), data.dw_segments.size() * 4, sum.data());
  if (data.main_grad != nullptr)
    add_bit_hash(data.main_grad->data(), data.main_grad->size() * 4, sum.data());
  return sum.download()[0];
}

TEST_F(Products, BitsDoNotDependOnSharingOrNumberOfSms) {
  ProductData data = make_data(768, 448, Groups({128, 256, 0, 333, 5, 190}));
  data.main_gradients();
  for (const ProductCase& product : product_cases()) {
    LaunchOptions options;
    options.sharing = Sharing::rows;
    const unsigned long long expected = output_bits(data, product, options);
    for (const Sharing sharing : {Sharing::rows, Sharing::channels}) {
      for (const int num_sms : {0, 2, 50, 1001}) {
        options.sharing = sharing;
        options.num_sms = num_sms;
        EXPECT_EQ(output_bits(data, product, options), expected)
            << product.name << ", sharing " << static_cast<int>(sharing) << ", SMs " << num_sms;
      }
    }
  }
}

TEST_F(Products, RepeatedRunsGiveTheSameBits) {
  constexpr int kRepetitions = 2000;
  std::vector<std::int32_t> counts;
  for (int expert = 0; expert < 8; ++expert) counts.push_back(expert % 2 == 0 ? 128 : 256);
  counts.push_back(77);
  counts.push_back(0);
  ProductData data = make_data(2048, 768, Groups(counts));
  for (const ProductCase& product : product_cases()) {
    const unsigned long long expected = output_bits(data, product, {});
    int num_different = 0;
    for (int i = 0; i < kRepetitions; ++i)
      num_different += output_bits(data, product, {}) != expected ? 1 : 0;
    EXPECT_EQ(num_different, 0) << product.name;
  }
}

TEST_F(Products, EmptyExpertsGiveZeroGradientsOrLeaveMainGradAlone) {
  for (int empty = 0; empty < 5; ++empty) {
    std::vector<std::int32_t> counts = {40, 70, 8, 129};
    if (empty < 4) {
      counts[empty] = 0;
    } else {
      counts = {0, 0, 0, 0};
    }
    ProductData data = make_data(320, 192, Groups(counts));
    const std::int64_t size = std::int64_t{320} * 192;
    multiply_weight_gradients(data.rows(), data.gradient_jobs(), GradientMode::store, {});
    const std::vector<bf16> stored = data.gradients.download();
    data.main_gradients();
    multiply_weight_gradients(data.rows(), data.gradient_jobs(data.main_gradients()),
                              GradientMode::accumulate, {});
    const std::vector<float> added = data.main_grad->download();
    for (int job = 0; job < 3; ++job) {
      for (int expert = 0; expert < 4; ++expert) {
        if (counts[expert] != 0) continue;
        const std::int64_t first = (job * 4 + expert) * size;
        for (std::int64_t i = first; i < first + size; ++i) {
          ASSERT_EQ(stored[i].bits, 0) << "job " << job << " expert " << expert;
          ASSERT_EQ(added[i], 3.0F) << "job " << job << " expert " << expert;
        }
      }
    }
  }
}

TEST_F(Products, AccumulatingTwiceAddsTwice) {
  ProductData data = make_data(256, 128, Groups({33, 64}));
  multiply_weight_gradients(data.rows(), data.gradient_jobs(data.main_gradients()),
                            GradientMode::store, {});
  const std::vector<float> once = data.main_grad->download();
  data.reset_main_gradients();
  for (int i = 0; i < 2; ++i) {
    multiply_weight_gradients(data.rows(), data.gradient_jobs(data.main_gradients()),
                              GradientMode::accumulate, {});
  }
  const std::vector<float> twice = data.main_grad->download();
  std::int64_t num_different = 0;
  for (std::size_t i = 0; i < once.size(); ++i)
    num_different += twice[i] != (3.0F + once[i]) + once[i] ? 1 : 0;
  EXPECT_EQ(num_different, 0);
}

// The L2's adder takes subnormals for zeros where `red` asks for it.
TEST_F(Products, AddingZeroKeepsSubnormals) {
  constexpr float kSubnormal = 0x1.8p-140F;
  ProductData data = make_data(256, 128, Groups({33, 64, 200}));
  for (const auto& [rows, columns] : data.row_operands())
    check_cuda(cudaMemset(rows->data(), 0, rows->size() * sizeof(bf16)), "memset");
  data.main_gradients();
  for (const float before : {kSubnormal, -kSubnormal}) {
    fill_constant(*data.main_grad, before);
    multiply_weight_gradients(data.rows(), data.gradient_jobs(data.main_gradients()),
                              GradientMode::accumulate, {});
    const std::vector<float> after = data.main_grad->download();
    EXPECT_EQ(std::count(after.begin(), after.end(), before), std::ssize(after)) << before;
  }
}

TEST_F(Products, FusedGateAndUpAreReadInPlace) {
  // [e, 2I, H]: gate rows, then up rows of each expert.
  const Groups groups({70, 40});
  ProductData data = make_data(256, 192, groups);
  DeviceBuffer<bf16> fused(2 * data.gate_eIH.size());
  const std::size_t half = std::size_t{192} * 256;
  for (int expert = 0; expert < 2; ++expert) {
    for (int part = 0; part < 2; ++part) {
      const bf16* from = (part == 0 ? data.gate_eIH : data.up_eIH).data() + expert * half;
      check_cuda(cudaMemcpy(fused.data() + (2 * expert + part) * half, from, half * 2,
                            cudaMemcpyDeviceToDevice),
                 "copy");
    }
  }
  const ConstTensorView both = tensor_view(static_cast<const bf16*>(fused.data()), {2, 384, 256});
  const auto run = [&](const ConstTensorView& gate, const ConstTensorView& up) {
    data.poison_outputs();
    multiply_gate_up(data.rows(), {}, data.rows_view(data.x_NH, 256), gate, up, {}, {},
                     data.rows_view(data.out_NI, 192), {});
    multiply_dx(data.rows(), data.rows_view(data.dg_NI, 192), data.rows_view(data.du_NI, 192), gate,
                up, data.rows_view(data.out_NH, 256), {});
    DeviceBuffer<unsigned long long> sum(1);
    check_cuda(cudaMemset(sum.data(), 0, 8), "memset");
    add_bit_hash(data.out_NI.data(), data.out_NI.size() * 2, sum.data());
    add_bit_hash(data.out_NH.data(), data.out_NH.size() * 2, sum.data());
    return sum.download()[0];
  };
  EXPECT_EQ(run(expert_rows(both, 0, 192), expert_rows(both, 192, 192)),
            run(data.gate(), data.up()));
}

constexpr ActivationKind kOtherActivations[] = {ActivationKind::clamped_swiglu,
                                                ActivationKind::gelu_erf, ActivationKind::gelu_tanh,
                                                ActivationKind::relu2, ActivationKind::identity};
/// Below the scale of g and u, so that both sides of the clamp are common.
constexpr float kClampLimit = 0.75F;

TEST_F(Products, OtherActivationsAreAccurate) {
  std::vector<std::int32_t> counts(101);
  std::iota(counts.begin(), counts.end(), 200);
  counts.insert(counts.begin(), {0, 1, 17, 48, 49});
  for (const auto& [hidden, intermediate] : {std::pair{256, 192}, {320, 704}}) {
    ProductData data = make_data(hidden, intermediate, Groups(counts));
    for (const ActivationKind kind : kOtherActivations) {
      SCOPED_TRACE(::testing::Message() << to_string(kind) << ", H " << hidden);
      data.activation = {kind, kClampLimit};
      expect_accurate(data);
    }
  }
}

TEST_F(Products, OtherActivationsGiveTheSameBitsSavingOrNotAndAgain) {
  ProductData data = make_data(768, 448, Groups({128, 256, 0, 333, 5, 190}));
  const auto a_bits = [&](const ProductCase& product) {
    data.poison_outputs();
    product.launch(data, {});
    DeviceBuffer<unsigned long long> sum(1);
    check_cuda(cudaMemset(sum.data(), 0, 8), "memset");
    add_bit_hash(data.out_NI.data(), data.out_NI.size() * 2, sum.data());
    return sum.download()[0];
  };
  for (const ActivationKind kind : kOtherActivations) {
    SCOPED_TRACE(to_string(kind));
    data.activation = {kind, kClampLimit};
    unsigned long long plain = 0;
    for (const ProductCase& product : product_cases()) {
      if (product.name == "gate_up") plain = a_bits(product);
      if (product.name == "gate_up_saving") EXPECT_EQ(a_bits(product), plain);
      if (product.name.starts_with("d")) continue;  // no activation in them
      const unsigned long long expected = output_bits(data, product, {});
      for (const int num_sms : {0, 2, 50, 1001}) {
        LaunchOptions options;
        options.num_sms = num_sms;
        for (int i = 0; i < 50; ++i) {
          ASSERT_EQ(output_bits(data, product, options), expected)
              << product.name << ", SMs " << num_sms << ", repetition " << i;
        }
      }
    }
  }
}

TEST_F(Products, RefusalsNameTheArgument) {
  ProductData data = make_data(256, 128, Groups({10}));
  ConstTensorView a = data.rows_view(data.a_NI, 128);
  a.sizes[1] = 96;
  a.strides[0] = 96;
  ConstTensorView down = data.down();
  down.sizes[2] = 96;
  const auto refusal = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const std::string narrow =
      refusal([&] { multiply_down(data.rows(), a, down, data.rows_view(data.out_NH, 256), {}); });
  EXPECT_NE(narrow.find("multiples of 64"), std::string::npos) << narrow;
  ConstTensorView wrong = data.rows_view(data.a_NI, 128);
  wrong.dtype = DType::fp32;
  const std::string dtype = refusal([&] {
    multiply_down(data.rows(), wrong, data.down(), data.rows_view(data.out_NH, 256), {});
  });
  EXPECT_NE(dtype.find("a: must be bf16"), std::string::npos) << dtype;
  const std::string gate = refusal([&] {
    multiply_gate_up(data.rows(), {ActivationKind::relu2}, data.rows_view(data.x_NH, 256),
                     data.gate(), data.up(), {}, {}, data.rows_view(data.out_NI, 128), {});
  });
  EXPECT_NE(gate.find("gate: must be absent"), std::string::npos) << gate;
}

}  // namespace
}  // namespace megamoe::testing
