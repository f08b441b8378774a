package structure

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const module = "github.com/weirlimit/weir/"

// everything is what only the package that assembles a node may import.
const everything = "*"

// mayImport says which packages of ours a package may import outside its tests. One that is not listed here is new:
// give it a line, with as little in it as will do.
var mayImport = map[string]string{
	"algo":                            "",
	"auth":                            "internal/netaddr internal/strictyaml limit limiter",
	"client":                          "algo internal/fifo internal/lend internal/netaddr limit proto/weir/v1 ring rpc/stream rpc/wire",
	"client/clientmetrics":            "client",
	"client/grpclimit":                "client client/middleware internal/netaddr internal/quotaheader",
	"client/httplimit":                "client client/middleware internal/netaddr internal/quotaheader",
	"client/middleware":               "client limit",
	"client/local":                    "client limiter policy ring",
	"cluster":                         "internal/fifo ring",
	"cluster/ownership":               "algo",
	"cluster/runner":                  "algo cluster/ownership internal/fifo internal/prefetch",
	"cmd/node":                        "internal/cli",
	"cmd/weir":                        "internal/cli",
	"gateway/console":                 "internal/fairshare internal/netaddr",
	"gateway/envoy":                   "algo gateway/envoy/kuadrantpb internal/fairshare internal/panics internal/quotaheader internal/reload internal/strictyaml internal/varint limit rpc/wire",
	"gateway/envoy/kuadrantpb":        "",
	"gateway/envoyquota":              "algo gateway/envoy internal/admission internal/fairshare limit rpc/wire",
	"gateway/grpc":                    "algo internal/admission internal/fairshare internal/fifo internal/panics limit limiter proto/weir/v1 rpc/wire",
	"gateway/gubernator":              "algo gateway/gubernator/gubernatorpb limit limiter ring rpc/wire",
	"gateway/gubernator/gubernatorpb": "",
	"gateway/http":                    "algo auth internal/admission internal/netaddr internal/quotaheader internal/timezone limit policy proto/weir/v1",
	"gateway/resp":                    "algo auth internal/admission internal/panics internal/quotaheader limit",
	"internal/admission":              "internal/fairshare internal/fifo internal/panics",
	"internal/cli":                    "algo auth client cluster gateway/envoy gateway/http internal/admission internal/control internal/load internal/netaddr internal/node internal/observe internal/reload internal/simulate internal/strictyaml limiter policy proto/weir/v1 rpc/wire",
	"internal/control":                "auth cluster cluster/ownership internal/netaddr internal/observe internal/panics internal/reload internal/strictyaml limit policy proto/weir/peer/v1 proto/weir/v1 rpc/wire",
	"internal/disk":                   "cluster/ownership internal/fifo internal/varint",
	"internal/fairshare":              "",
	"internal/fifo":                   "",
	"internal/lend":                   "algo internal/fifo limit",
	"internal/load":                   "algo client proto/weir/v1",
	"internal/netaddr":                "",
	"internal/node":                   everything,
	"internal/observe":                "algo auth cluster cluster/runner internal/fifo internal/reload limiter policy proto/weir/peer/v1 proto/weir/v1 ring store",
	"internal/panics":                 "",
	"internal/prefetch":               "",
	"internal/quotaheader":            "algo limit",
	"internal/reload":                 "internal/fifo",
	"internal/simulate":               "algo policy",
	"internal/strictyaml":             "",
	"internal/timezone":               "",
	"internal/varint":                 "",
	"limit":                           "algo",
	"limiter":                         "algo cluster/ownership internal/fairshare internal/fifo internal/lend internal/panics limit policy ring store",
	"policy":                          "algo internal/reload internal/strictyaml internal/timezone limit",
	"proto":                           "",
	"proto/envoyset":                  "",
	"proto/weir/peer/v1":              "proto/weir/v1",
	"proto/weir/v1":                   "",
	"ring":                            "",
	"rpc/peer":                        "algo cluster/ownership internal/fifo internal/panics limit limiter proto/weir/peer/v1 proto/weir/v1 rpc/stream rpc/transport rpc/wire",
	"rpc/replica":                     "cluster/ownership internal/fifo internal/varint proto/weir/peer/v1 rpc/stream rpc/transport",
	"rpc/stream":                      "internal/fifo",
	"rpc/transport":                   "cluster/ownership internal/fifo proto/weir/peer/v1 ring rpc/wire",
	"rpc/wire":                        "algo internal/timezone limit proto/weir/v1",
	"store":                           "algo cluster/ownership internal/fifo internal/prefetch internal/timezone internal/varint",
	"test/checker":                    "",
	"test/cluster":                    "",
	"test/collision":                  "",
	"test/conformance":                "",
	"test/console":                    "",
	"test/expect":                     "",
	"test/kubernetes":                 "",
	"test/model":                      "",
	"test/must":                       "test/expect",
	"test/mutants":                    "",
	"test/scripted":                   "limit limiter",
	"test/simulation":                 "",
	"test/structure":                  "",
	"test/testkit":                    "test/expect test/must",
	"test/testkit/certstest":          "test/must",
	"weir":                            "client internal/admission internal/node internal/observe internal/reload limit limiter policy",
}

// pure packages are functions of their arguments: no goroutine to wait for, no lock, no clock, no network, no log.
var pure = []string{"algo", "ring", "cluster/ownership"}

var impure = regexp.MustCompile(`^(context|log(/.*)?|net(/.*)?|os(/.*)?|sync(/.*)?|syscall)$`)

// clocks lists the functions that read the clock, outside tests. A decision reads it once, at its owner's edge, and is
// passed the instant from there on. A function that is missing here is a new reader: if it can be passed an instant, do
// that; if it only bounds a wait or shows a duration, add it.
var clocks = []string{
	"client/client.go stopwatch",
	"client/decide.go attempt",
	"client/lease.go renew",
	"client/limiter.go AcquireN",
	"client/loans.go systemClocks",
	"client/nodes.go pick",
	"client/remote.go CheckTo",
	"client/remote.go sendAll",
	"client/limiter.go WaitN",
	"client/limiter.go waitDelay",
	"cluster/prober.go now", // back-off
	"cluster/transport.go admit",
	"internal/node/envoy.go gubernatorService", // reset_time is a time of day
	"internal/node/envoy.go envoyService",      // windows that are aligned to the epoch end by the time of day
	"internal/node/describe.go inspect",
	"internal/reload/certs.go OpenCerts", // certificates expire by the time of day
	"test/testkit/certstest/certstest.go Issue",
	"test/testkit/certstest/certstest.go NewAuthority",
	"internal/observe/metrics.go readDecisions", // for how long peaks are shown
	"internal/node/observe.go closesConnections",
	"internal/node/readiness.go Settle", // paces a wait
	"internal/node/start.go Start",
	"internal/node/overrides.go openReplicator", // paces comparisons, and shows when something was changed
	"internal/node/denials.go newDenials",
	"internal/cli/secrets.go newSecrets", // certificates are good from then on
	"gateway/console/console.go send",    // until when an event has to be written
	"gateway/resp/command.go client",
	"gateway/resp/command.go info",
	"gateway/resp/conn.go drain",
	"gateway/resp/conn.go draining",
	"gateway/resp/conn.go fill",
	"gateway/resp/conn.go flush",
	"gateway/resp/conn.go linger",
	"gateway/resp/conn.go newConn",
	"gateway/resp/conn.go shake",
	"gateway/resp/resp.go New",
	"internal/admission/conn.go Authenticated",
	"internal/admission/buffers.go wait", // for how long connections wait
	"limiter/limiter.go ProcessClock",    // the clock that decides
	"limiter/route.go deadline",
	"limiter/shed.go over", // against a caller's deadline
	"internal/admission/calls.go until",
	"internal/admission/calls.go receive", // for how long calls take
	"internal/admission/calls.go unary",
	"internal/admission/conn.go Write",
	"internal/admission/conn.go allowance",
	"internal/admission/conn.go reject", // bounds a write
	"internal/admission/frames.go awaitTurn",
	"internal/admission/listener.go serveLocked",
	"internal/load/load.go now",
	"client/middleware/middleware.go log", // paces log lines
	"internal/observe/metrics_calls.go HTTP",
	"gateway/grpc/checkstream.go observe",
	"rpc/peer/forwarder.go Forward",
	"rpc/peer/forwarder.go forgetLocked",
	"rpc/peer/forwarder.go take",
	"test/testkit/grpc.go Soon",
	"test/testkit/testkit.go until",
}

// panics lists the functions that may panic: on a mistake in the program, never in its input.
var panics = []string{
	"algo/arena.go Alloc",
	"algo/arena.go Free",
	"algo/limits.go counter",
	"cluster/runner/boottime_linux.go BootTime",
	"internal/node/authorize.go beginHTTP", // in net/http's way, to end a request without an answer
	"internal/node/observe.go recovering",  // again, in net/http's way
	"client/middleware/middleware.go New",
	"internal/panics/panics.go Wait", // again, where it is recovered
	"internal/simulate/candidate.go alloc",
	"policy/policy.go hashOf", // of a field that JSON has no form for
}

// pkg is what go list tells of a package.
type pkg struct {
	Dir, ImportPath, Doc      string
	Imports, GoFiles          []string
	TestGoFiles, XTestGoFiles []string
	TestImports, XTestImports []string
}

// name is the package's path in the module; that of the package at its root is weir.
func (p *pkg) name() string { return nameOf(p.ImportPath) }

func nameOf(path string) string {
	if path+"/" == module {
		return "weir"
	}
	return strings.TrimPrefix(path, module)
}

func packages(t *testing.T) []pkg {
	t.Helper()
	// The go command remembers which directories a test looked into, and runs it again when one has changed. Of what go
	// list looks into it would not know.
	err := filepath.WalkDir("../..", func(_ string, d fs.DirEntry, err error) error {
		if d.IsDir() && d.Name() == ".git" {
			return filepath.SkipDir
		}
		return err
	})
	must.NoError(t, err)
	cmd := exec.Command("go", "list",
		"-json=Dir,ImportPath,Doc,Imports,GoFiles,TestGoFiles,XTestGoFiles,TestImports,XTestImports", module+"...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	must.True(t, err == nil, "go list: %v\n%s", err, &stderr)
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

func TestImports(t *testing.T) {
	all := packages(t)
	for _, p := range all {
		allowed, listed := mayImport[p.name()]
		expect.True(t, listed, "%s is new: say in mayImport what it may import", p.name())
		for _, i := range p.Imports {
			if ours := nameOf(i); ours != i && allowed != everything &&
				!slices.Contains(strings.Fields(allowed), ours) {
				t.Errorf("%s must not import %s: see mayImport, and ARCHITECTURE.md for why", p.name(), ours)
			}
			expect.True(t, !slices.Contains(pure, p.name()) || !impure.MatchString(i),
				"%s must not import %s: it is to be a pure function of what it is given", p.name(), i)
		}
		for _, i := range slices.Concat(p.TestImports, p.XTestImports) {
			expect.True(t, i != module+"internal/cli", "the tests of %s must not import internal/cli", p.name())
		}
		generated := strings.HasPrefix(p.name(), "proto/weir/") // package proto speaks for them
		expect.True(t, p.Doc != "" || len(p.GoFiles) <= 0 || generated, "%s has no package comment", p.name())
	}
	for name := range mayImport {
		expect.True(t, slices.ContainsFunc(all, func(p pkg) bool { return p.name() == name }),
			"mayImport lists %s, which is gone", name)
	}
}

// A program that links the client gets neither the service nor what that stands on.
func TestClientLinks(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", module+"client").Output()
	must.NoError(t, err)
	deps := strings.Fields(string(out))
	must.True(t, slices.Contains(deps, module+"limit"), "go list -deps lists %d packages, and not limit", len(deps))
	banned := regexp.MustCompile(
		`weir/(store|limiter|policy|auth|cluster|gateway|internal/node)|go-control-plane|yaml|memberlist|cobra|prometheus`)
	for _, d := range deps {
		expect.True(t, !banned.MatchString(d), "client links %s", d)
	}
}

func TestHabits(t *testing.T) {
	unfinished := regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XXX)\b`)
	var reads, panicking []string
	for _, p := range packages(t) {
		for _, file := range p.GoFiles {
			at := path.Join(p.name(), file)
			f := parse(t, filepath.Join(p.Dir, file))
			if ast.IsGenerated(f) {
				continue
			}
			for _, d := range f.Decls {
				where := at + " (package level)"
				if fn, ok := d.(*ast.FuncDecl); ok {
					where = at + " " + fn.Name.Name
					expect.True(t, fn.Name.Name != "init" || fn.Recv != nil,
						"%s: init functions run whether or not they are wanted: have somebody call it", at)
				}
				ast.Inspect(d, func(n ast.Node) bool {
					switch n := n.(type) {
					case *ast.SelectorExpr:
						if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" &&
							slices.Contains([]string{"Now", "Since", "Until"}, n.Sel.Name) {
							reads = append(reads, where)
						}
						if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && n.Sel.Name == "LoadLocation" &&
							slices.Contains(pure, p.name()) {
							t.Errorf("%s looks for a time zone, which takes a file: have it passed in", where)
						}
					case *ast.CallExpr:
						if x, ok := n.Fun.(*ast.Ident); ok && x.Name == "panic" {
							panicking = append(panicking, where)
						}
						if message, ok := logged(n); ok && !plainMessage.MatchString(message) {
							t.Errorf("%s logs %s: a message is constant and lower case, a noun and a verb; details are attributes", where, message)
						}
					}
					return true
				})
			}
		}
		for _, file := range slices.Concat(p.GoFiles, p.TestGoFiles, p.XTestGoFiles) {
			f := parse(t, filepath.Join(p.Dir, file))
			if ast.IsGenerated(f) {
				continue
			}
			for _, group := range f.Comments {
				if word := unfinished.FindString(group.Text()); word != "" {
					t.Errorf("%s says %s: do it, or open an issue", path.Join(p.name(), file), word)
				}
			}
		}
	}
	compare(t, "the clock is read in %s: pass it the instant, or add it to clocks",
		"clocks lists %s, which reads no clock (any more)", reads, clocks)
	compare(t, "%s panics: return an error, or add it to panics if only a mistake in the program can lead there",
		"panics lists %s, which does not panic (any more)", panicking, panics)
}

// plainMessage is what a literal of a log message is like: some words of letters.
var plainMessage = regexp.MustCompile(`^"[a-z][a-z0-9-]*( [a-z0-9-]+){0,6}"$`)

// logged returns the message that a call of a logger's method logs, as it stands in the source; "…" when it is not a
// literal.
func logged(call *ast.CallExpr) (message string, ok bool) {
	method, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return "", false
	}
	var logger string
	switch x := method.X.(type) {
	case *ast.Ident:
		logger = x.Name
	case *ast.SelectorExpr:
		logger = x.Sel.Name
	}
	at := -1
	switch method.Sel.Name {
	case "Debug", "Info", "Warn", "Error":
		at = 0
	case "DebugContext", "InfoContext", "WarnContext", "ErrorContext":
		at = 1
	}
	if at < 0 || len(call.Args) <= at || !slices.Contains([]string{"log", "logger", "Logger", "slog"}, logger) {
		return "", false
	}
	if literal, ok := call.Args[at].(*ast.BasicLit); ok {
		return literal.Value, true
	}
	return "…", true
}

// A library knows settings by their names, which are flags in one program only: see cli.flagged. The tags of a node's
// configuration are the help of that program's flags.
func TestLibrariesNameNoFlag(t *testing.T) {
	flag := regexp.MustCompile(`(^|[\s("])--[a-z]`)
	for _, p := range packages(t) {
		// dial declares flags that commands share.
		if slices.Contains([]string{"internal/cli", "internal/dial"}, p.name()) ||
			strings.HasPrefix(p.name(), "test/") || strings.HasPrefix(p.name(), "proto/") {
			continue
		}
		for _, file := range p.GoFiles {
			ast.Inspect(parse(t, filepath.Join(p.Dir, file)), func(n ast.Node) bool {
				if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING && !strings.HasPrefix(l.Value, "`flag:") &&
					flag.MatchString(strings.Trim(l.Value, "`\"")) {
					t.Errorf("%s names a flag: %s", path.Join(p.name(), file), l.Value)
				}
				return true
			})
		}
	}
}

func parse(t *testing.T, file string) *ast.File {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
	must.NoError(t, err)
	return f
}

// compare holds what was found to what is allowed.
func compare(t *testing.T, extra, missing string, found, allowed []string) {
	t.Helper()
	for _, f := range slices.Compact(slices.Sorted(slices.Values(found))) {
		expect.True(t, slices.Contains(allowed, f), extra, f)
	}
	for _, a := range allowed {
		expect.True(t, slices.Contains(found, a), missing, a)
	}
}
