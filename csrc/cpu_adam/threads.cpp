#include "threads.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cpu_adam {
namespace {

// The ABI that compilers emit for "#pragma omp parallel"; libgomp, LLVM's and Intel's runtimes all export it.
using GompParallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
using OmpInt = int (*)();

struct OpenMp {
    GompParallel parallel = nullptr;
    OmpInt thread_num = nullptr;
    std::string library;
};

int collect_name(dl_phdr_info* info, std::size_t, void* names) {
    if (info->dlpi_name && *info->dlpi_name)
        static_cast<std::vector<std::string>*>(names)->push_back(info->dlpi_name);
    return 0;
}

// Looks a runtime up through `object` and the libraries that it depends on. Never loads anything.
OpenMp lookup(const std::string& object) {
    OpenMp found;
    void* handle = dlopen(object.c_str(), RTLD_NOLOAD | RTLD_LAZY);
    if (handle == nullptr)
        return found;
    found.parallel = reinterpret_cast<GompParallel>(dlsym(handle, "GOMP_parallel"));
    found.thread_num = reinterpret_cast<OmpInt>(dlsym(handle, "omp_get_thread_num"));
    if (found.parallel != nullptr && found.thread_num != nullptr) {
        Dl_info where;
        found.library = dladdr(reinterpret_cast<void*>(found.parallel), &where) ? where.dli_fname : object;
    } else {
        found = OpenMp{};
        dlclose(handle);
    }
    return found; // the handle stays open: the runtime must not be unloaded under us
}

// torch's own runtime first (a process may hold several), then any libgomp.
OpenMp find_openmp() {
    std::vector<std::string> names;
    dl_iterate_phdr(collect_name, &names);
    for (const char* wanted : {"libtorch_cpu.", "libgomp"})
        for (const std::string& name : names) {
            if (name.find(wanted) == std::string::npos)
                continue;
            OpenMp found = lookup(name);
            if (found.parallel != nullptr)
                return found;
        }
    return {};
}

// Torch may be imported after our first call, so a failed search is repeated; a found runtime is kept.
const OpenMp* openmp() {
    static std::atomic<const OpenMp*> known{nullptr};
    const OpenMp* result = known.load(std::memory_order_acquire);
    if (result != nullptr)
        return result;
    OpenMp found = find_openmp();
    if (found.parallel == nullptr)
        return nullptr;
    const OpenMp* fresh = new OpenMp(std::move(found)); // lives as long as the process
    if (known.compare_exchange_strong(result, fresh, std::memory_order_acq_rel))
        return fresh;
    delete fresh;
    return result;
}

// Default rounding and no flushing of subnormals, in any state the thread was left in (torch.set_flush_denormal, a
// library built with -ffast-math).
class DefaultFloatEnvironment {
  public:
#if defined(__x86_64__)
    DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#elif defined(__aarch64__)
    DefaultFloatEnvironment() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
    }
    ~DefaultFloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

  private:
    std::uint64_t saved_;
#endif
};

struct alignas(64) Share {
    std::atomic<std::size_t> next{0};
    std::size_t end = 0;
};

struct Job {
    TaskBody body;
    void* context;
    std::vector<Share> shares;
    OmpInt thread_num;
};

void work(Job& job, std::size_t self) {
    const DefaultFloatEnvironment environment;
    const std::size_t count = job.shares.size();
    for (std::size_t offset = 0; offset < count; ++offset) {
        Share& share = job.shares[(self + offset) % count];
        for (;;) {
            const std::size_t task = share.next.fetch_add(1, std::memory_order_relaxed);
            if (task >= share.end)
                break;
            job.body(job.context, task);
        }
    }
}

void openmp_body(void* data) {
    Job& job = *static_cast<Job*>(data);
    work(job, static_cast<std::size_t>(job.thread_num()));
}

void pool_body(void* data, int thread) { work(*static_cast<Job*>(data), static_cast<std::size_t>(thread)); }

} // namespace

void parallel_for(std::size_t num_tasks, int num_threads, TaskBody body, void* context) {
    const std::size_t threads = std::min(num_tasks, static_cast<std::size_t>(std::max(num_threads, 1)));
    if (threads <= 1) {
        const DefaultFloatEnvironment environment;
        for (std::size_t task = 0; task < num_tasks; ++task)
            body(context, task);
        return;
    }
    Job job{body, context, std::vector<Share>(threads), nullptr};
    for (std::size_t t = 0; t < threads; ++t) {
        job.shares[t].next = num_tasks * t / threads;
        job.shares[t].end = num_tasks * (t + 1) / threads;
    }
    if (const OpenMp* runtime = openmp()) {
        job.thread_num = runtime->thread_num;
        runtime->parallel(openmp_body, &job, static_cast<unsigned>(threads), 0);
    } else {
        run_on_pool(static_cast<int>(threads), pool_body, &job);
    }
}

std::string threading_backend() {
    const OpenMp* runtime = openmp();
    return runtime ? "openmp: " + runtime->library : "own pool";
}

} // namespace cpu_adam
