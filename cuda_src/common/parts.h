// The architecture parts of this process: which file serves which compute capability, and the kernels found
// in it. A part is loaded once and then serves every device of its kind: its kernel handles belong to no
// context.
#pragma once

#include <dlfcn.h>

#include <condition_variable>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "common/driver.h"
#include "common/error.h"

namespace tejit {

enum class PartKind { kSharedObject = 0, kCubin = 1 };

class Part {
 public:
  Part(int cc, std::string path, PartKind kind) : cc_(cc), path_(std::move(path)), kind_(kind) {}

  // The handle of a kernel, for cuLaunchKernel. Loads the file at the first call; a failure is the same every
  // time.
  driver::Handle kernel(const char* name) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!loaded_) {
      loaded_ = true;
      load();
    }
    if (!failure_.empty()) throw std::runtime_error(failure_);
    const auto known = kernels_.find(name);
    if (known != kernels_.end()) return known->second;
    driver::Handle found = nullptr;
    std::string why = "it is not in there, or the CUDA runtime in that file does not take this driver";
    if (kind_ == PartKind::kSharedObject) {
      found = find_(name);
    } else {
      const int result = driver::functions().library_kernel(&found, library_, name);
      if (result != 0) why = driver::describe(result);
      if (result != 0) found = nullptr;
    }
    if (found == nullptr) {
      fail("tejit: kernel ", name, " cannot be had from ", path_, ": ", why, ". ", kAdvice);
    }
    kernels_.emplace(name, found);
    return found;
  }

 private:
  static constexpr const char* kAdvice =
      "Clear the kernel cache (python -m tejit cache clear) and start again, or set TEJIT_BACKEND=torch";

  void load() {
    if (kind_ == PartKind::kSharedObject) {
      void* file = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
      const char* why = file ? nullptr : dlerror();
      if (file) find_ = reinterpret_cast<Finder>(dlsym(file, "tejit_part_kernel"));
      if (find_ == nullptr) refuse(why ? why : "it does not export tejit_part_kernel");
      return;
    }
    if (!read_image()) return refuse("it cannot be read, or is empty");
    const int result =
        driver::functions().library_load(&library_, image_.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result != 0) refuse(driver::describe(result));
  }

  bool read_image() {
    std::FILE* file = std::fopen(path_.c_str(), "rb");
    if (file == nullptr) return false;
    char chunk[1 << 16];
    while (const std::size_t count = std::fread(chunk, 1, sizeof chunk, file)) image_.append(chunk, count);
    const bool whole = std::ferror(file) == 0;
    std::fclose(file);
    return whole && !image_.empty();
  }

  void refuse(const std::string& why) {
    failure_ = text("tejit: the kernels for compute capability ", cc_ / 10, ".", cc_ % 10,
                    " cannot be loaded from ", path_, ": ", why, ". ", kAdvice);
  }

  using Finder = void* (*)(const char*);

  const int cc_;
  const std::string path_;
  const PartKind kind_;
  std::mutex mutex_;
  bool loaded_ = false;
  std::string failure_;
  Finder find_ = nullptr;
  driver::Handle library_ = nullptr;
  std::string image_;  // the driver may keep pointers into it
  std::unordered_map<std::string, driver::Handle> kernels_;
};

class Parts {
 public:
  using Callback = int (*)(int cc);

  // Never destroyed: ops may still run while the process ends.
  static Parts& of_process() {
    static Parts* parts = new Parts;
    return *parts;
  }

  // Does not touch CUDA. A second registration is taken as long as no op has used the first.
  void add(int cc, const std::string& path, PartKind kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    Entry& entry = entries_[cc];
    if (!entry.used) entry.part = std::make_shared<Part>(cc, path, kind);
  }

  void set_callback(Callback callback) {
    std::lock_guard<std::mutex> lock(mutex_);
    callback_ = callback;
    for (auto& [cc, entry] : entries_) entry.asked = false;
  }

  // The part for a compute capability, or null: then the op runs the reference. The callback is asked once
  // for each cc, without the lock held: it runs Python, and may build for a minute.
  std::shared_ptr<Part> find(int cc) {
    std::unique_lock<std::mutex> lock(mutex_);
    Entry& entry = entries_[cc];
    while (entry.part == nullptr && entry.asker != std::thread::id()) {
      // Somebody else is asking. Whoever holds the interpreter's lock must not wait: the callback needs it.
      if (entry.asker == std::this_thread::get_id() || holds_interpreter()) return nullptr;
      answered_.wait(lock);
    }
    if (entry.part == nullptr && callback_ != nullptr && !entry.asked) {
      const Callback callback = callback_;
      entry.asker = std::this_thread::get_id();
      lock.unlock();
      callback(cc);  // its answer is whether a part was registered
      lock.lock();
      entry.asker = std::thread::id();
      entry.asked = true;
      answered_.notify_all();
    }
    entry.used = entry.used || entry.part != nullptr;
    return entry.part;
  }

 private:
  struct Entry {
    std::shared_ptr<Part> part;
    bool used = false;
    bool asked = false;
    std::thread::id asker;
  };

  static bool holds_interpreter() {
    static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto running = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
    return check != nullptr && running != nullptr && running() != 0 && check() != 0;
  }

  std::mutex mutex_;
  std::condition_variable answered_;
  std::map<int, Entry> entries_;
  Callback callback_ = nullptr;
};

}  // namespace tejit
