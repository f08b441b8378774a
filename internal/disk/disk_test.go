package disk

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// rig is a disk whose clock the test sets, and the core's side of its log.
type rig struct {
	t   *testing.T
	cfg Config
	now int64
	log testkit.Buffer
	d   *Disk

	number, position uint64
	acks             chan *ownership.BlockAck
}

func newRig(t *testing.T, fs vfs.FS) *rig {
	r := &rig{t: t, now: int64(time.Hour)}
	r.cfg = Config{Dir: "data", Cluster: "c", Name: "a", Boot: "one", FS: fs, Now: func() int64 { return r.now },
		Logger: r.log.Logger()}
	return r
}

func (r *rig) open() *rig {
	r.t.Helper()
	r.d = must.Value(Open(r.cfg))(r.t)
	return r
}

func (r *rig) start() {
	r.number++
	r.position, r.acks = 0, make(chan *ownership.BlockAck, 100)
	r.d.Start(func(a *ownership.BlockAck) { r.acks <- a })
}

// send sends one block and returns its confirmation.
func (r *rig) send(entries ...ownership.Entry) *ownership.BlockAck {
	r.t.Helper()
	r.position++
	r.d.Send(&ownership.Block{Log: r.number, Position: r.position, Entries: entries})
	for {
		if a := <-r.acks; a.Position == r.position {
			return a
		}
	}
}

func (r *rig) close() { must.NoError(r.t, r.d.Close()) }

// kept restores and lists what there is, as "partition term/attachment: chunk@age".
func (r *rig) kept() (all []string) {
	r.t.Helper()
	must.NoError(r.t, r.d.Restore(func(of Copy) error {
		s := fmt.Sprintf("%d %d/%d:", of.Partition, of.Position.Term.N, of.Position.Attachment)
		expect.Equal(r.t, of.Origin.N, uint64(9), "origin")
		for _, c := range of.Chunks {
			s += fmt.Sprintf(" %s@%v", c.Data, time.Duration(c.Age))
		}
		all = append(all, s)
		return nil
	}))
	return all
}

func (r *rig) expect(want ...string) {
	r.t.Helper()
	expect.Equal(r.t, strings.Join(r.kept(), "\n"), strings.Join(want, "\n"))
}

func entry(p int, term uint64, flags, chunk string) ownership.Entry {
	return ownership.Entry{
		Partition: p, Term: ownership.Term{N: term}, Attachment: 7, Origin: ownership.Term{N: 9}, Chunk: []byte(chunk),
		Begin: strings.Contains(flags, "b"), Complete: strings.Contains(flags, "c"), More: strings.Contains(flags, "m"),
	}
}

// TestRestore: what is confirmed comes back, in order, as old as it is.
func TestRestore(t *testing.T) {
	r := newRig(t, vfs.NewMem()).open()
	r.start()
	r.send(entry(3, 1, "b", "one"), entry(4, 1, "bc", "four"))
	r.now += int64(time.Minute)
	r.send(entry(3, 1, "m", "two"))
	r.send(entry(3, 1, "c", "-and-a-half"))
	r.d.SetMembers([]string{"a", "b"})
	r.send(entry(3, 2, "", ""), entry(5, 1, "b", "never whole"))
	r.close()

	r.now += int64(time.Second)
	r.open()
	expect.Equal(t, strings.Join(r.d.Members(), " "), "a b")
	r.expect("3 2/7: one@1m1s two-and-a-half@1s", "4 1/7: four@1m1s")
	r.start()
	r.send(entry(4, 0, "bc", ""), entry(3, 3, "bc", "new"))
	r.close()

	// Another boot of the host, whose clock begins anew. How long it was down is not known, and counts as nothing.
	r.now, r.cfg.Boot = 5, "two"
	r.open()
	r.expect("3 3/7: new@0s")
	r.now += int64(time.Minute)
	r.close()
	r.open()
	r.expect("3 3/7: new@1m0s")
	r.close()
}

// TestInterruptedCopy: the former copy stays until the new one is whole, and gets what the new one has so far.
func TestInterruptedCopy(t *testing.T) {
	r := newRig(t, vfs.NewMem()).open()
	r.start()
	r.send(entry(3, 1, "bc", "old"), entry(3, 1, "", "change"))
	r.send(entry(3, 2, "b", "new"), entry(3, 2, "m", "torn"))
	r.close()
	r.open()
	r.expect("3 1/7: old@0s change@0s new@0s")
	r.start()
	r.send(entry(3, 2, "b", "newer"))
	r.send(entry(3, 2, "c", "newest"))
	r.close()
	r.open()
	r.expect("3 2/7: newer@0s newest@0s")
	r.close()
}

// TestNewCopy: a log that has outgrown its copy is begun anew, and one that the disk does not know is refused.
func TestNewCopy(t *testing.T) {
	r := newRig(t, vfs.NewMem()).open()
	r.start()
	a := r.send(entry(3, 1, "", "change of nothing"))
	expect.True(t, len(a.Refusals) == 1 && a.Refusals[0].Outcome == ownership.Again, "%+v", a)
	refused := 0
	long := strings.Repeat("x", 1000)
	for i := range 400 {
		flags := ""
		if i == 0 || refused > 0 {
			flags, refused = "bc", 0
		}
		refused = len(r.send(entry(3, 1, flags, long)).Refusals)
	}
	r.close()
	r.open()
	n := len(strings.Fields(r.kept()[0]))
	expect.True(t, n < 3*slack/1000, "%d entries of 400 are kept", n)
	r.close()
}

// TestRepeats: a block that is sent again is confirmed again, and written once.
func TestRepeats(t *testing.T) {
	r := newRig(t, vfs.NewMem()).open()
	r.start()
	r.send(entry(3, 1, "bc", "one"))
	r.position--
	r.send(entry(3, 1, "bc", "one"), entry(3, 1, "", "again"))
	r.close()
	r.open()
	r.expect("3 1/7: one@0s")
	r.close()
}

// TestStrangers: a directory of another node, cluster or format, or in use, is rejected in words.
func TestStrangers(t *testing.T) {
	fs := vfs.NewMem()
	r := newRig(t, fs).open()
	key := must.Value(r.d.Key([]byte("first")))(t)
	expect.Equal(t, string(key), "first")
	r.close()
	for want, change := range map[string]func(*Config){
		"of another cluster":           func(c *Config) { c.Cluster = "d" },
		"of the node a, and this is b": func(c *Config) { c.Name = "b" },
	} {
		cfg := r.cfg
		change(&cfg)
		_, err := Open(cfg)
		expect.ErrorContains(t, err, want)
		expect.ErrorContains(t, err, filepath.Join("data", Folder))
	}
	r.open()
	expect.Equal(t, string(must.Value(r.d.Key([]byte("second")))(t)), "first")
	r.close()
	for want, other := range map[string]int{"of a later version": format + 1, "of an earlier version": format - 1} {
		r := newRig(t, vfs.NewMem()).open()
		r.d.head.Format = other
		must.NoError(t, r.d.save())
		r.close()
		expect.ErrorContains(t, expect.Err(Open(r.cfg)), want)
	}

	r = newRig(t, nil)
	r.cfg.Dir = t.TempDir()
	r.open()
	_, err := Open(r.cfg)
	expect.ErrorContains(t, err, "lock")
	r.close()
	r.cfg.Dir = filepath.Join(t.TempDir(), "file")
	must.NoError(t, os.WriteFile(r.cfg.Dir, nil, 0o600))
	_, err = Open(r.cfg)
	expect.ErrorContains(t, err, "not a directory")
}

// TestCrash: whatever the file system forgets of what was not synced, each partition has what was confirmed.
func TestCrash(t *testing.T) {
	for seed := range uint64(30) {
		fs := vfs.NewCrashableMem()
		r := newRig(t, fs).open()
		r.start()
		rng := rand.New(rand.NewPCG(seed, 1))
		confirmed := [4]int{}
		for i := range 20 + rng.IntN(40) {
			p := rng.IntN(len(confirmed))
			flags := ""
			if confirmed[p] == 0 || rng.IntN(8) == 0 {
				flags = "bc"
			}
			r.send(entry(p, uint64(i+1), flags, fmt.Sprint("n", i+1)))
			confirmed[p] = i + 1
		}
		lost := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rng})
		r.close()
		again := newRig(t, lost).open()
		found := 0
		must.NoError(t, again.d.Restore(func(of Copy) error {
			found++
			p, at, chunks := of.Partition, of.Position, of.Chunks
			expect.Equal(t, string(chunks[len(chunks)-1].Data), fmt.Sprint("n", confirmed[p]), "seed %d, partition %d",
				seed, p)
			expect.Equal(t, at.Term.N, uint64(confirmed[p]))
			return nil
		}))
		expect.True(t, found > 2, "seed %d: %d", seed, found)
		again.close()
	}
}

// TestWriteErrors: a disk that cannot be written says so once, confirms nothing more, and what it confirmed before is
// there.
func TestWriteErrors(t *testing.T) {
	for _, bad := range []error{syscall.ENOSPC, syscall.EIO} {
		mem := vfs.NewCrashableMem()
		var broken atomic.Bool
		fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			if broken.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
				return bad
			}
			return nil
		}))
		r := newRig(t, fs)
		failed := make(chan error, 10)
		r.cfg.Failed = func(err error) { failed <- err }
		r.open().start()
		r.send(entry(3, 1, "bc", "one"))
		broken.Store(true)
		r.d.Send(&ownership.Block{Log: r.number, Position: 2, Entries: []ownership.Entry{entry(3, 1, "", "two")}})
		expect.ErrorIs(t, <-failed, bad)
		r.d.Send(&ownership.Block{Log: r.number, Position: 3, Entries: []ownership.Entry{entry(3, 1, "", "three")}})
		must.NoError(t, r.d.Close())
		expect.ErrorIs(t, r.d.Stats().Err, bad)
		expect.Equal(t, len(failed)+len(r.acks), 0, "more is told")
		expect.Equal(t, strings.Count(r.log.String(), "counters not written any more"), 1)
		again := newRig(t, mem.CrashClone(vfs.CrashCloneCfg{})).open()
		again.expect("3 1/7: one@0s")
		again.close()
	}
}

// TestBitFlips: damage of what was synced is an error and never a lower count.
func TestBitFlips(t *testing.T) {
	r := newRig(t, nil)
	r.cfg.Dir = t.TempDir()
	r.open().start()
	for i := range 50 {
		flags := ""
		if i == 0 {
			flags = "bc"
		}
		r.send(entry(3, 1, flags, strings.Repeat(fmt.Sprint("n", i, " "), 300)))
	}
	r.close()
	files := must.Value(filepath.Glob(filepath.Join(r.cfg.Dir, Folder, "*.log")))(t)
	must.True(t, len(files) > 0, "no log")
	flipped := false
	for _, name := range files {
		data := must.Value(os.ReadFile(name))(t)
		if len(data) < 10_000 {
			continue
		}
		data[len(data)/2] ^= 0x10
		must.NoError(t, os.WriteFile(name, data, 0o600))
		flipped = true
	}
	must.True(t, flipped, "nothing to damage")
	_, err := r.sum()
	expect.True(t, err != nil, "damage was not noticed")
}

// sum opens a disk that may be damaged, and adds up what it restores: the bytes of each partition, times its number.
func (r *rig) sum() (sum int, err error) {
	d, err := Open(r.cfg)
	if err != nil {
		return 0, err
	}
	err = d.Restore(func(of Copy) error {
		for _, c := range of.Chunks {
			sum += of.Partition * len(c.Data)
		}
		return nil
	})
	must.NoError(r.t, d.Close())
	return sum, err
}

// TestTableDamage: of a flipped bit in a table either one line tells, or everything is there.
func TestTableDamage(t *testing.T) {
	r := newRig(t, nil)
	whole := t.TempDir()
	r.cfg.Dir = whole
	r.open().start()
	r.send(entry(3, 1, "bc", "one"), entry(4, 1, "bc", strings.Repeat("four", 2000)))
	r.send(entry(3, 1, "", "two"))
	r.close()
	r.open().close() // which writes what is in the log to a table
	files := must.Value(filepath.Glob(filepath.Join(whole, Folder, "*.sst")))(t)
	must.True(t, len(files) > 0, "no table")
	told := 0
	for _, name := range files {
		data := must.Value(os.ReadFile(name))(t)
		for i := range 16 {
			r.cfg.Dir = t.TempDir() // a disk that fails at the start keeps its lock
			must.NoError(t, os.CopyFS(r.cfg.Dir, os.DirFS(whole)))
			at := i * len(data) / 16
			data[at] ^= 0x10
			must.NoError(t, os.WriteFile(filepath.Join(r.cfg.Dir, Folder, filepath.Base(name)), data, 0o600))
			data[at] ^= 0x10
			sum, err := r.sum()
			if err == nil {
				expect.Equal(t, sum, 3*6+4*8000, "byte %d of %d", at, len(data))
				continue
			}
			told++
			expect.ErrorContains(t, err,
				filepath.Join(r.cfg.Dir, Folder)+": the counters are damaged; remove this folder")
			expect.Equal(t, strings.Count(err.Error(), "\n"), 0, "line ends in %q", err)
		}
	}
	expect.True(t, told > 10, "only %d flips are told", told)
	t.Logf("%d flips of %d are told", told, 16*len(files))
}

// TestClockBehind: under a clock that is behind what was written on the same boot, entries are as old as they were, and
// age from then on.
func TestClockBehind(t *testing.T) {
	r := newRig(t, vfs.NewMem()).open()
	r.start()
	r.send(entry(3, 1, "bc", "one"))
	r.now += int64(time.Minute)
	r.send(entry(3, 1, "", "two"))
	r.close()
	r.now -= int64(time.Hour) / 2
	r.open()
	r.expect("3 1/7: one@1m0s two@0s")
	r.now += int64(time.Second)
	r.close()
	r.open()
	r.expect("3 1/7: one@1m1s two@1s")
	r.close()
}

// TestFullAtStart: a disk on which the engine cannot write its log to a table is an error at the start.
func TestFullAtStart(t *testing.T) {
	mem := vfs.NewCrashableMem()
	r := newRig(t, mem).open()
	r.start()
	r.send(entry(3, 1, "bc", "one"))
	var mended atomic.Bool
	left := mem.CrashClone(vfs.CrashCloneCfg{})
	r.close()
	r = newRig(t, errorfs.Wrap(left, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if !mended.Load() && strings.HasSuffix(op.Path, ".sst") && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			return syscall.ENOSPC
		}
		return nil
	})))
	_, err := Open(r.cfg)
	expect.ErrorIs(t, err, syscall.ENOSPC)
	mended.Store(true) // so that the engine ends its attempts
}

// TestForTheNodeAlone: other users of the host read no counters, although they may look into the data directory.
func TestForTheNodeAlone(t *testing.T) {
	r := newRig(t, nil)
	r.cfg.Dir = t.TempDir()
	must.NoError(t, os.Chmod(r.cfg.Dir, 0o755))
	r.open().close()
	info := must.Value(os.Stat(filepath.Join(r.cfg.Dir, Folder)))(t)
	expect.Equal(t, info.Mode().Perm(), 0o700, "permissions")
}

// TestHead: the head is plain JSON, so that an operator can read whose directory it is.
func TestHead(t *testing.T) {
	r := newRig(t, vfs.NewMem()).open()
	var got map[string]any
	must.NoError(t, json.Unmarshal(must.Value(r.d.get(headKey))(t), &got))
	expect.Equal(t, fmt.Sprint(got["Name"], got["Cluster"], got["Format"]), fmt.Sprint("ac", format))
	r.close()
}
