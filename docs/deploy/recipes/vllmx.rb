# Homebrew: `brew install vllmx.rb`, or in a tap. Made from docs/deploy/recipes by a release.
class Vllmx < Formula
  include Language::Python::Virtualenv

  desc "Serving engine for large language models"
  homepage "https://pypi.org/project/vllmx/"
  url "https://files.pythonhosted.org/packages/source/v/vllmx/vllmx-@VERSION@.tar.gz"
  sha256 "@SHA256 vllmx@"
  license "Apache-2.0"

  depends_on "python@3.13"

  def install
    virtualenv_create(libexec, "python3.13", without_pip: false)
    extra = (OS.mac? && Hardware::CPU.arm?) ? "cpu,metal" : "cpu"
    system libexec/"bin/python", "-m", "pip", "install", "vllmx[#{extra}]==#{version}"
    bin.install_symlink libexec/"bin/vllmx"
    generate_completions_from_executable(bin/"vllmx", "completion")
  end

  service do
    run [opt_bin/"vllmx", "serve"]
    keep_alive true
    log_path var/"log/vllmx.log"
    error_log_path var/"log/vllmx.log"
  end

  test do
    answer = shell_output("#{bin}/vllmx complete --model demo --prompts Once --max-tokens 1")
    refute_empty answer
  end
end
