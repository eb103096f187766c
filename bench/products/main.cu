// Times the products of one MoE layer on one GPU beside the dense ceiling of the same run, and
// checks sampled values first.
//
//   products_bench [--shapes qwen3-235b,qwen3-30b] [--products down,dx] [--json out.json] [--rows
//   rows.json]
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "gpu/product_cases.cuh"
#include "kernels/products/products.h"
#include "measure.cuh"
#include "shapes.h"

namespace megamoe::bench {
namespace {

struct Arguments {
  std::string shapes = "qwen3-235b,qwen3-30b,deepseek-v3";
  std::string products;
  std::string json;
  std::string rows;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--shapes") arguments.shapes = argv[i + 1];
    if (name == "--products") arguments.products = argv[i + 1];
    if (name == "--json") arguments.json = argv[i + 1];
    if (name == "--rows") arguments.rows = argv[i + 1];
  }
  return arguments;
}

bool listed(const std::string& list, const std::string& name) {
  return list.empty() || ("," + list + ",").find("," + name + ",") != std::string::npos;
}

const char* name_of(products::Sharing sharing) {
  return sharing == products::Sharing::rows       ? "rows"
         : sharing == products::Sharing::channels ? "channels"
                                                  : "auto";
}

/// The ceilings of the run.
struct Ceilings {
  double dense_tflops;
  double copy_tb_per_s;
};

struct Record {
  std::string shape;
  std::string product;
  std::string sharing;
  Timing timing;
  double flops;
  double bytes;
  double error;
  double tolerance;

  [[nodiscard]] double tflops() const { return flops / timing.median_ms / 1e9; }
};

void print(const Record& record, const Ceilings& ceilings) {
  std::printf("%-12s %-16s %-9s %8.3f ms (%.3f..%.3f) %7.1f TFLOP/s %.3f P  error %.2e\n",
              record.shape.c_str(), record.product.c_str(), record.sharing.c_str(),
              record.timing.median_ms, record.timing.min_ms, record.timing.max_ms, record.tflops(),
              record.tflops() / ceilings.dense_tflops, record.error);
  std::fflush(stdout);
}

void write_json(const std::string& path, const std::vector<Record>& records,
                const Ceilings& ceilings) {
  std::ofstream file(path);
  file << "[\n";
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Record& r = records[i];
    file << "{\"shape\": \"" << r.shape << "\", \"product\": \"" << r.product
         << "\", \"sharing\": \"" << r.sharing << "\", \"ms\": " << r.timing.median_ms
         << ", \"min_ms\": " << r.timing.min_ms << ", \"max_ms\": " << r.timing.max_ms
         << ", \"flops\": " << r.flops << ", \"bytes\": " << r.bytes
         << ", \"relative_error\": " << r.error << ", \"dense_tflops\": " << ceilings.dense_tflops
         << ", \"copy_tb_per_s\": " << ceilings.copy_tb_per_s << "}"
         << (i + 1 < records.size() ? ",\n" : "\n");
  }
  file << "]\n";
}

void write_rows(const std::string& path) {
  std::ofstream file(path);
  file << "{";
  bool first = true;
  for (const Shape& shape : shapes()) {
    const RaggedRows rows = route_uniformly(shape, 2, 8192);
    file << (first ? "" : ",\n") << "\"" << shape.name << "\": {\"hidden\": " << shape.hidden
         << ", \"intermediate\": " << shape.intermediate << ", \"rows\": [";
    for (std::size_t i = 0; i < rows.count.size(); ++i)
      file << (i == 0 ? "" : ", ") << rows.count[i];
    file << "]}";
    first = false;
  }
  file << "}\n";
}

int run(const Arguments& arguments) {
  if (!arguments.rows.empty()) write_rows(arguments.rows);
  std::vector<Record> records;
  const Ceilings ceilings{dense_tflops(), copy_tb_per_s()};
  std::printf("dense 8192^3: %.1f TFLOP/s, device copy: %.2f TB/s\n", ceilings.dense_tflops,
              ceilings.copy_tb_per_s);
  for (const Shape& shape : shapes()) {
    if (!listed(arguments.shapes, shape.name)) continue;
    const RaggedRows rows = route_uniformly(shape, 2, 8192);
    testing::ProductData data(shape.hidden, shape.intermediate, rows.begin, rows.count,
                              rows.capacity);
    std::printf("%s: H %d I %d, %zu experts, %lld rows (%d..%d)\n", shape.name.c_str(),
                shape.hidden, shape.intermediate, rows.count.size(),
                static_cast<long long>(rows.total),
                *std::min_element(rows.count.begin(), rows.count.end()),
                *std::max_element(rows.count.begin(), rows.count.end()));
    for (const testing::ProductCase& product : testing::product_cases()) {
      if (!listed(arguments.products, product.name)) continue;
      for (const products::Sharing sharing : product.sharings) {
        products::LaunchOptions options;
        options.sharing = sharing;
        options.expected_group_rows =
            static_cast<int>(rows.total / static_cast<std::int64_t>(rows.count.size()));
        data.poison_outputs();
        product.launch(data, options);
        const double error = product.sampled_error(data);
        const Timing timing = time_burst([&] { product.launch(data, options); });
        const auto num_rows = static_cast<double>(rows.total);
        const auto num_experts = static_cast<double>(rows.count.size());
        records.push_back(
            {shape.name, product.name, name_of(sharing), timing,
             product.work.flops(num_rows, shape.hidden, shape.intermediate),
             product.work.bytes(num_rows, num_experts, shape.hidden, shape.intermediate), error,
             product.tolerance});
        print(records.back(), ceilings);
      }
    }
  }
  std::printf("dense 8192^3 at the end: %.1f TFLOP/s\n", dense_tflops());
  if (!arguments.json.empty()) write_json(arguments.json, records, ceilings);
  int num_wrong = 0;
  for (const Record& record : records) {
    if (!(record.error < record.tolerance)) {
      std::printf("WRONG: %s %s %s error %.3e\n", record.shape.c_str(), record.product.c_str(),
                  record.sharing.c_str(), record.error);
      ++num_wrong;
    }
  }
  return num_wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace megamoe::bench

int main(int argc, char** argv) {
  try {
    return megamoe::bench::run(megamoe::bench::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "products_bench: %s\n", error.what());
    return 1;
  }
}
