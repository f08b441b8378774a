package deploy

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

var withDocker = flag.Bool("docker", false,
	"start a Docker engine of its own, build the image, and start compose.yaml; as root")

// dockerd is a Docker engine that lives as long as a test: in a network and a mount namespace of its own, so that it
// leaves the machine's bridges and firewall alone, and with all its files in one directory.
type dockerd struct {
	pid    int
	socket string
}

// TestDocker builds the image and has Compose run it. No image is pulled: the ones that the build and Compose begin
// with are made of the Go and the Prometheus of this machine. There is no Grafana in Debian to make one of, so it is
// not started.
func TestDocker(t *testing.T) {
	if !*withDocker {
		t.Skip("takes root, minutes and some GiB of disk: go test . -run TestDocker$ -docker")
	}
	if os.Getuid() != 0 {
		t.Skip("-docker starts an engine, which takes root")
	}
	for _, tool := range []string{"/usr/sbin/dockerd", "/usr/bin/docker-compose", "/usr/bin/prometheus",
		"/usr/bin/nsenter", "/usr/sbin/ip", "/usr/sbin/iptables", "/usr/bin/curl"} {
		if _, err := os.Stat(tool); err != nil {
			t.Skipf("%v: apt-get install docker.io docker-compose prometheus util-linux iproute2 iptables curl", err)
		}
	}
	e := startEngine(t)

	from := regexp.MustCompile(`(?m)^FROM .*?(golang:\S+) AS`).FindStringSubmatch(string(readFile(t, "../Dockerfile")))
	must(t, from != nil, "the Dockerfile does not build from a golang image")
	goroot := strings.TrimSpace(output(t, "go", "env", "GOROOT"))
	e.image(t, from[1], []string{"ENV PATH=/usr/local/go/bin:/bin GOTOOLCHAIN=local GOPATH=/go"}, func(w *tar.Writer) {
		addTree(t, w, goroot, "usr/local/go", func(path string) bool {
			return path != "test" && path != "api" && path != "doc" && !strings.Contains(path, "testdata")
		})
		addModules(t, w)
		addProgram(t, w, "/bin/sh", "bin/sh")
	})
	services := compose(t).Services
	e.image(t, services["prometheus"].Image, []string{
		`ENTRYPOINT ["/bin/prometheus"]`,
		`CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]`,
	}, func(w *tar.Writer) { addProgram(t, w, "/usr/bin/prometheus", "bin/prometheus") })

	image := services["weir-0"].Image
	e.docker(t, "build", "--build-arg", "VERSION=v0-rehearsal", "--build-arg", "GOPROXY=file:///modules", "-t", image,
		"..")
	got := e.docker(t, "run", "--rm", image, "--version")
	expect(t, strings.Contains(got, "v0-rehearsal"), "the image's version is %q", got)
	size, err := strconv.Atoi(strings.TrimSpace(e.docker(t, "image", "inspect", "-f", "{{.Size}}", image)))
	expect(t, err == nil && size <= 40<<20, "the image has %d bytes (%v), want no more than 40 MiB", size, err)
	t.Logf("the image has %.1f MB", float64(size)/1e6)

	e.compose(t, "up", "-d", "--no-build", "weir-0", "weir-1", "weir-2", "prometheus")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(e.compose(t, "logs", "--no-color", "--tail=40"))
		}
		e.compose(t, "down", "-v")
	})
	container := func(service string) string { return strings.TrimSpace(e.compose(t, "ps", "-q", service)) }
	for _, s := range []string{"weir-0", "weir-1", "weir-2"} {
		eventually(t, s+" is healthy", func() error {
			got := e.docker(t, "inspect", "-f", "{{.State.Health.Status}}", container(s))
			if strings.TrimSpace(got) != "healthy" {
				return errors.New(got)
			}
			return nil
		})
	}
	eventually(t, "all members are active and ready", func() error { return e.settled(t, container("weir-0"), 3) })
	got = e.docker(t, "exec", container("weir-2"), "/weir", "check", "alice", "--policy", "login")
	expect(t, strings.Contains(got, "allowed"), "a check of a sample policy is answered %q", got)

	// What is stopped hands over: nothing more is admitted afterwards, and it says good-bye by itself.
	stopped := container("weir-1")
	e.compose(t, "stop", "weir-1")
	state := strings.TrimSpace(e.docker(t, "inspect", "-f", "{{.State.ExitCode}}", stopped))
	expect(t, state == "0", "the stopped node ended with status %s", state)
	log := e.docker(t, "logs", stopped)
	expect(t, !strings.Contains(log, "hand-over incomplete") && strings.Contains(log, "handed over"),
		"the stopped node did not hand everything over:\n%s", log)
	e.compose(t, "start", "weir-1")
	eventually(t, "the stopped node is back", func() error { return e.settled(t, container("weir-0"), 3) })

	// All stop, and go on counting from their volumes.
	got = e.docker(t, "exec", container("weir-0"), "/weir", "check", "team", "--policy", "tokens", "--cost", "1000000")
	expect(t, strings.Contains(got, "allowed"), "a month's tokens are answered %q", got)
	e.compose(t, "down")
	e.compose(t, "up", "-d", "--no-build", "weir-0", "weir-1", "weir-2", "prometheus")
	eventually(t, "all are back", func() error { return e.settled(t, container("weir-0"), 3) })
	got = e.docker(t, "exec", container("weir-0"), "/weir", "check", "team", "--policy", "tokens", "--cost", "0")
	expect(t, strings.Contains(got, "remaining=0"), "after all nodes stopped: %q", got)

	eventually(t, "Prometheus scrapes all three", func() error {
		got := e.curl(t, "http://127.0.0.1:9090/api/v1/query", "--data-urlencode", `query=count(up{job="weir"} == 1)`)
		if !strings.Contains(got, `"3"`) {
			return errors.New(got)
		}
		return nil
	})
	got = e.curl(t, "http://127.0.0.1:9090/api/v1/rules")
	expect(t, strings.Contains(got, "HighWindowUtilization"), "Prometheus has the rules %s", got)
}

// output runs a program to its end and returns what it says.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	return finish(t, exec.Command(name, args...))
}

func finish(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var all bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &all
	}
	cmd.Stderr = &all
	err := cmd.Run()
	must(t, err == nil, "%s: %v\n%s", strings.Join(cmd.Args, " "), err, &all)
	return all.String()
}

func startEngine(t *testing.T) *dockerd {
	t.Helper()
	dir, err := os.MkdirTemp("", "weir-docker-") // short: a socket's path is
	noError(t, err)
	t.Cleanup(func() {
		err := os.RemoveAll(dir)
		expect(t, err == nil, "%v", err)
	})
	log := value(os.Create(filepath.Join(dir, "log")))(t)
	defer log.Close()
	e := &dockerd{socket: filepath.Join(dir, "docker.sock")}
	cmd := exec.Command("/bin/sh", "-c", `/usr/sbin/ip link set lo up && exec /usr/sbin/dockerd "$@"`, "dockerd",
		"--host=unix://"+e.socket, "--data-root="+filepath.Join(dir, "data"), "--exec-root="+filepath.Join(dir, "exec"),
		"--pidfile="+filepath.Join(dir, "pid"))
	cmd.Stdout, cmd.Stderr = log, log
	// The engine's mounts end with it, and its bridge and its firewall are nobody else's.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Unshareflags: syscall.CLONE_NEWNS,
		Pdeathsig: syscall.SIGTERM}
	noError(t, cmd.Start())
	e.pid = cmd.Process.Pid
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		err := cmd.Process.Signal(syscall.SIGTERM)
		expect(t, err == nil, "%v", err)
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Error("dockerd does not end: killing it")
			err := cmd.Process.Kill()
			expect(t, err == nil, "%v", err)
			<-ended
		}
	})
	eventually(t, "dockerd answers", func() error {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("dockerd has ended: %v\n%s", err, readFile(t, log.Name()))
		default:
		}
		return exec.Command("/usr/bin/docker", "-H", "unix://"+e.socket, "version").Run()
	})
	return e
}

// eventually waits for what must come within a few minutes, on however slow a machine.
func eventually(t *testing.T, what string, ask func() error) {
	t.Helper()
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	late := time.After(3 * time.Minute)
	for {
		err := ask()
		if err == nil {
			return
		}
		select {
		case <-late:
			t.Fatalf("%s: not in three minutes: %v", what, err)
		case <-tick.C:
		}
	}
}

func (e *dockerd) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	// BuildKit is in Debian's own docker, and needs no plug-in there.
	cmd.Env = append(os.Environ(), "DOCKER_HOST=unix://"+e.socket, "DOCKER_BUILDKIT=1", "BUILDKIT_PROGRESS=plain",
		"DOCKER_CONFIG="+filepath.Dir(e.socket))
	return cmd
}

func (e *dockerd) docker(t *testing.T, args ...string) string {
	t.Helper()
	return finish(t, e.command("/usr/bin/docker", args...))
}

func (e *dockerd) compose(t *testing.T, args ...string) string {
	t.Helper()
	return finish(t, e.command("/usr/bin/docker-compose",
		append([]string{"-f", "../compose.yaml", "-p", "weir"}, args...)...))
}

// curl asks from within the engine's network, where Compose publishes ports.
func (e *dockerd) curl(t *testing.T, args ...string) string {
	t.Helper()
	return output(t, "/usr/bin/nsenter", append([]string{"--net=/proc/" + strconv.Itoa(e.pid) + "/ns/net",
		"/usr/bin/curl", "-sS", "--max-time", "20"}, args...)...)
}

// settled reports why the cluster, as one node sees it, is not whole.
func (e *dockerd) settled(t *testing.T, container string, members int) error {
	cmd := e.command("/usr/bin/docker", "exec", container, "/weir", "status", "-o", "json")
	out, err := cmd.Output()
	if err != nil {
		return err
	}
	var status struct {
		Ready   bool `json:"ready"`
		Members []struct {
			State string `json:"state"`
		} `json:"members"`
	}
	err = json.Unmarshal(out, &status)
	must(t, err == nil, "%v in:\n%s", err, out)
	active := 0
	for _, m := range status.Members {
		if m.State == "active" {
			active++
		}
	}
	if !status.Ready || active != members {
		return fmt.Errorf("ready is %v with %d active members of %d", status.Ready, active, len(status.Members))
	}
	return nil
}

// image makes an image of files of this machine.
func (e *dockerd) image(t *testing.T, name string, changes []string, files func(*tar.Writer)) {
	t.Helper()
	var args []string
	for _, c := range changes {
		args = append(args, "-c", c)
	}
	cmd := e.command("/usr/bin/docker", append(append([]string{"import"}, args...), "-", name)...)
	stdin, err := cmd.StdinPipe()
	noError(t, err)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	noError(t, cmd.Start())
	archive := tar.NewWriter(stdin)
	add(t, archive, "tmp/", fs.ModeDir|0o777, nil)
	files(archive)
	err = errors.Join(archive.Close(), stdin.Close(), cmd.Wait())
	must(t, err == nil, "%s: %v\n%s", strings.Join(cmd.Args, " "), err, &said)
}

func add(t *testing.T, w *tar.Writer, name string, mode fs.FileMode, data []byte) {
	t.Helper()
	h := &tar.Header{Name: name, Mode: int64(mode.Perm()), Size: int64(len(data)), Typeflag: tar.TypeReg}
	if mode.IsDir() {
		h.Typeflag = tar.TypeDir
	}
	noError(t, w.WriteHeader(h))
	_, err := w.Write(data)
	noError(t, err)
}

// addTree adds the regular files below a directory, and of it what keep keeps.
func addTree(t *testing.T, w *tar.Writer, dir, as string, keep func(string) bool) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if !keep(rel) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		add(t, w, as+"/"+filepath.ToSlash(rel), info.Mode(), readFile(t, path))
		return nil
	})
	noError(t, err)
}

// addModules adds what the binary is built from as a module proxy in files.
func addModules(t *testing.T, w *tar.Writer) {
	t.Helper()
	output(t, "go", "build", "-C", "..", "-o", os.DevNull, "./cmd/node") // downloads what is missing
	needed := make(map[string]bool)
	list := exec.Command("go", "list", "-C", "..", "-deps", "-f",
		"{{with .Module}}{{if .Version}}{{.GoMod}}{{end}}{{end}}", "./cmd/node")
	for line := range strings.Lines(finish(t, list)) {
		needed[strings.TrimSuffix(strings.TrimSpace(line), ".mod")] = true
	}
	cache := filepath.Join(strings.TrimSpace(output(t, "go", "env", "GOMODCACHE")), "cache", "download")
	addTree(t, w, cache, "modules", func(path string) bool {
		switch filepath.Ext(path) {
		case ".zip":
			return needed[filepath.Join(cache, strings.TrimSuffix(path, ".zip"))]
		case ".ziphash", ".lock", ".partial":
			return false
		}
		return path != "sumdb"
	})
}

// addProgram adds a program and the libraries that it is linked to.
func addProgram(t *testing.T, w *tar.Writer, file, as string) {
	t.Helper()
	add(t, w, as, 0o755, readFile(t, file))
	for _, lib := range regexp.MustCompile(`/\S+\.so\S*`).FindAllString(output(t, "ldd", file), -1) {
		add(t, w, strings.TrimPrefix(lib, "/"), 0o755, readFile(t, lib))
	}
}
