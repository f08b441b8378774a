package simulation

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/must"
)

var update = flag.Bool("update", false, "write what the scenarios' output is into testdata")

// A scenario is a file of commands, each followed by ---- and what it is expected to say up to an empty line. Every
// policy has one key for each partition, called policy/partition. NODES are names put together, such as abc.
//
//	policy NAME limit=5 window=30s [algorithm=sliding_log] [durability=async] [strict] [cold=closed]
//	cluster nodes=3 partitions=4 [voters=3] [spare=1] [delay=1ms] [one-sided]
//	        starts all nodes but the spare ones and waits until all is settled; one-sided: who is heard is taken to be there
//	run 500ms, settle
//	check KEY at=NODE [n=5] [cost=1], room KEY, owners
//	crash NODE, start NODE, leave NODE, pause NODE 4s, suspend NODE 4s
//	split NODES NODES..., silence NODES NODES (the first are not heard by the second), heal
//	doubt NODE by=NODES for=3s, lag NODE 3s (it hears late of who is there), clock NODE rate=-1000 (parts per million)
//	lose KIND [from=NODE] [to=NODE] [n=1] [crash=NODE]: the next such messages, and a node that crashes at that moment
//	slow NODES NODES 400ms: from the first to the second
//	hold KIND from=NODE holder=NODE key=KEY before=3us: messages arrive so long before the holder's lease ends
//	until holder=NODE key=KEY before=60ms: run until so long before the holder's lease ends
//	judge: what the checker says up to now
type scenario struct {
	*world
	t        testing.TB
	policies []*policy
	args     map[string]string
	words    []string // that have no =
}

// play runs a file's commands and returns what it looks like with their output.
func (s *scenario) play(text string) string {
	var out strings.Builder
	lines := strings.Split(text, "\n")
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		if line == "" || strings.HasPrefix(line, "#") {
			out.WriteString(line + "\n")
			continue
		}
		out.WriteString(line + "\n----\n")
		if i+1 < len(lines) && lines[i+1] == "----" {
			for i += 2; i < len(lines) && lines[i] != ""; i++ { // what it said last time, and the empty line
			}
		}
		s.args, s.words = make(map[string]string), nil
		for _, word := range strings.Fields(line)[1:] {
			if k, v, ok := strings.Cut(word, "="); ok {
				s.args[k] = v
			} else {
				s.words = append(s.words, word)
			}
		}
		said := s.do(strings.Fields(line)[0])
		if s.world != nil {
			for _, l := range s.lines {
				out.WriteString(strings.TrimRight(l, " ") + "\n")
			}
			s.lines = nil
		}
		out.WriteString(said + "\n")
	}
	return strings.TrimRight(out.String(), "\n") + "\n"
}

func (s *scenario) duration(text string) int64 {
	d := must.Value(time.ParseDuration(text))(s.t)
	return int64(d)
}

func (s *scenario) number(name string, otherwise int64) int64 {
	text, ok := s.args[name]
	if !ok {
		return otherwise
	}
	n, err := strconv.ParseInt(text, 10, 64)
	must.NoError(s.t, err, "%s", name)
	return n
}

func (s *scenario) word(i int) string {
	must.True(s.t, i < len(s.words), "a command lacks an argument: has %v", s.words)
	return s.words[i]
}

// node is the process on the named host.
func (s *scenario) node(name string) *process {
	h := s.host(name)
	must.True(s.t, h != nil && h.proc != nil, "%s is not running", name)
	return h.proc
}

func (s *scenario) key(name string) (*policy, *store.Key) {
	pol, part, _ := strings.Cut(name, "/")
	for _, p := range s.policies {
		if p.Name == pol {
			for i := range p.keys {
				if strconv.Itoa(p.keys[i].Partition) == part {
					return p, &p.keys[i]
				}
			}
		}
	}
	s.t.Fatalf("no key %s", name)
	return nil, nil
}

func (s *scenario) do(command string) string {
	switch command {
	case "policy":
		s.policy()
	case "cluster":
		s.cluster()
	case "run":
		s.run(s.now + s.duration(s.word(0)))
	case "settle":
		begun := s.now
		if !s.world.until(40*second, s.quiet) {
			return "all is not settled\n"
		}
		s.disturbed = false
		s.calmed()
		return fmt.Sprintf("all is settled after %v\n", time.Duration(s.now-begun).Round(time.Millisecond))
	case "check":
		return s.check()
	case "room":
		return s.room()
	case "owners":
		return s.owners()
	case "crash":
		s.node(s.word(0)).crash()
		return fmt.Sprintf("copies were complete: %v\n", s.history.Crashes[len(s.history.Crashes)-1].Copied)
	case "start":
		s.start(s.host(s.word(0)))
	case "leave":
		s.node(s.word(0)).leave()
	case "pause", "suspend":
		s.divide(2)
		s.node(s.word(0)).pause(s.duration(s.word(1)), command == "suspend")
	case "split":
		s.divide(len(s.words))
		for i, a := range s.words {
			for j, b := range s.words {
				if i != j {
					s.cutAll(a, b, true)
				}
			}
		}
	case "silence":
		s.divide(2)
		s.cutAll(s.word(0), s.word(1), true)
	case "heal":
		for _, h := range s.hosts {
			for _, g := range s.hosts {
				s.cut(h, g, false)
			}
		}
	case "doubt":
		s.divide(2)
		for _, name := range s.args["by"] {
			if x := s.node(string(name)).sight(s.node(s.word(0))); x != nil {
				x.doubted = s.now + s.duration(s.args["for"])
			}
		}
	case "lag":
		s.host(s.word(0)).lag = s.duration(s.word(1))
	case "clock":
		s.setRate(s.host(s.word(0)), s.number("rate", 0)*1000)
	case "lose":
		s.traps = append(s.traps, &trap{
			kind: s.word(0), from: s.args["from"], to: s.args["to"], left: int(s.number("n", 1)),
			crash: s.args["crash"],
		})
	case "slow":
		for _, a := range s.word(0) {
			for _, b := range s.word(1) {
				s.link(s.host(string(a)), s.host(string(b))).extra = s.duration(s.word(2))
			}
		}
	case "hold":
		p := s.node(s.args["holder"])
		_, key := s.key(s.args["key"])
		before := s.duration(s.args["before"])
		s.traps = append(s.traps, &trap{kind: s.word(0), from: s.args["from"], left: 1, hold: func() int64 {
			return p.host.truth(p.data.parts[key.Partition].lease) - before
		}})
	case "until":
		p := s.node(s.args["holder"])
		_, key := s.key(s.args["key"])
		s.run(p.host.truth(p.data.parts[key.Partition].lease) - s.duration(s.args["before"]))
	case "judge":
		vs := s.violations()
		if len(vs) == 0 {
			return "nothing is wrong\n"
		}
		var text strings.Builder
		for _, v := range vs {
			text.WriteString(v.String() + "\n")
		}
		return text.String()
	default:
		s.t.Fatalf("unknown command %s", command)
	}
	return ""
}

// divide notes that nodes may take each other for gone.
func (s *scenario) divide(sides int) {
	s.split(sides)
	s.disturbed = true
	s.proto.Sole = false
}

func (s *scenario) cutAll(from, to string, cut bool) {
	for _, a := range from {
		for _, b := range to {
			s.cut(s.host(string(a)), s.host(string(b)), cut)
		}
	}
}

func (s *scenario) policy() {
	limit := algo.Limit{Algorithm: algo.SlidingLog, Limit: s.number("limit", 5),
		Window: time.Duration(s.duration(s.args["window"]))}
	if name, ok := s.args["algorithm"]; ok {
		limit.Algorithm, _ = algo.ParseAlgorithm(name)
	}
	durability := checker.Async
	if name, ok := s.args["durability"]; ok {
		durability = checker.Durability(slices.Index([]string{"none", "async", "escrow", "sync"}, name))
	}
	p := newPolicy(s.word(0), limit, durability, slices.Contains(s.words, "strict"), s.args["cold"] == "closed", 0, 1)
	s.policies = append(s.policies, p)
}

func (s *scenario) cluster() {
	set := calm(1)
	set.hosts = int(s.number("nodes", 3))
	set.partitions = int(s.number("partitions", 3))
	set.oneSided = slices.Contains(s.words, "one-sided")
	if text, ok := s.args["delay"]; ok {
		set.delay = s.duration(text)
	}
	set.voters = int(s.number("voters", 0))
	set.policies = s.policies
	for _, p := range s.policies {
		for part := range set.partitions {
			p.addKey(fmt.Sprintf("%s/%d", p.Name, part), part)
		}
	}
	s.world = newWorld(set)
	s.proto.Sole = true
	for _, h := range s.hosts[:set.hosts-int(s.number("spare", 0))] {
		s.start(h)
	}
	if !s.world.until(20*second, s.quiet) {
		s.say("all is not settled")
	}
}

// check asks a number of times, a millisecond apart, and waits for the answers.
func (s *scenario) check() string {
	pol, key := s.key(s.word(0))
	count := map[string]int{}
	var order []string
	left := s.number("n", 1)
	done := func(o *op) {
		left--
		result := [...]string{"", "admitted", "refused", "failed"}[o.result]
		if o.result == checker.Failed {
			result += " (" + o.why + ")"
		} else {
			result += " by " + o.node
		}
		if o.degraded && o.result == checker.Admitted {
			result += ", degraded"
		}
		if count[result] == 0 {
			order = append(order, result)
		}
		count[result]++
	}
	p := s.node(s.args["at"])
	for i := range left {
		s.after(i*millisecond, func() { s.submit(p, pol, key, s.number("cost", 1), done) })
	}
	for left > 0 {
		s.step()
	}
	var out strings.Builder
	for _, result := range order {
		fmt.Fprintf(&out, "%d %s\n", count[result], result)
	}
	return out.String()
}

func (s *scenario) room() string {
	pol, key := s.key(s.word(0))
	text := ""
	p := s.target(key.Partition)
	s.submit(p, pol, key, 0, func(o *op) {
		if text = fmt.Sprintf("%d left of %d\n", o.remaining, pol.Limit); o.result == checker.Failed {
			text = "failed (" + o.why + ")\n"
		} else if s.splits == len(s.history.Splits) && !s.disturbed {
			s.history.Usages = append(s.history.Usages,
				checker.Usage{Policy: pol.Name, Key: key.Key, At: o.at, Remaining: o.remaining})
		}
	})
	for text == "" {
		s.step()
	}
	return text
}

// owners says who holds what, with * where the copy at the backup is current.
func (s *scenario) owners() string {
	var out strings.Builder
	for part := range s.partitions {
		fmt.Fprintf(&out, "%d:", part)
		for _, p := range s.running() {
			if p.owns(part) {
				fmt.Fprintf(&out, " %s at %v", p.self.Name, p.core.Route(part).Term)
				if p.data.parts[part].caught {
					out.WriteString(" *")
				}
			}
		}
		out.WriteString("\n")
	}
	return out.String()
}

// setRate changes how fast a host's clock runs, from now on.
func (s *scenario) setRate(h *host, rate int64) {
	before := h.elapsed()
	h.rate = rate
	h.offset += before - h.elapsed()
}

// TestScenarios runs testdata/*.txt.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	must.True(t, err == nil && len(files) != 0, "no scenarios: %v", err)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text := must.Value(os.ReadFile(file))(t)
			s := &scenario{t: t}
			got := s.play(string(text))
			for _, v := range s.violations() {
				t.Error(v)
			}
			switch {
			case got == string(text):
			case *update:
				must.NoError(t, os.WriteFile(file, []byte(got), 0o644))
			default:
				t.Errorf("%s: the output differs; look at it with -update and git diff:\n%s", file,
					differences(string(text), got))
			}
		})
	}
}

// differences shows the first lines that are not the same.
func differences(want, got string) string {
	a, b := strings.Split(want, "\n"), strings.Split(got, "\n")
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	return fmt.Sprintf("line %d:\nwant:\n%s\ngot:\n%s", i+1, strings.Join(a[i:min(i+8, len(a))], "\n"),
		strings.Join(b[i:min(i+8, len(b))], "\n"))
}
