package control

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func mustOpen(t testing.TB, name string) *Book {
	t.Helper()
	return must.Value(OpenBook(name))(t)
}

// change commits one, and returns it as it was made, with what there was before.
func change(b *Book, node string, e Entry) (now, before *Entry, err error) {
	s := &Step{Change: &e}
	b.Commit(node, s)
	if s.Err != nil || s.Change.Version == (Version{}) {
		return nil, nil, s.Err
	}
	return s.Change, s.Before, nil
}

// merge commits the entries of another member.
func merge(b *Book, entries []Entry) (changed bool, err error) {
	s := &Step{Merge: entries}
	return b.Commit("n", s), s.Err
}

func set(t testing.TB, b *Book, node, key, settings string) Entry {
	t.Helper()
	e, _, err := change(b, node,
		Entry{ID: ID{Policy: "login", Key: key}, Settings: settings, By: "ops", At: time.UnixMilli(1000)})
	must.True(t, err == nil && e != nil, "change of %q: %v %v", key, e, err)
	return *e
}

// epoch is a time that an entry may have, as the zero Time is not.
var epoch = time.UnixMilli(0).UTC()

func contentOf(b *Book) (all []Entry) {
	for _, e := range b.now.Load().sorted {
		all = append(all, *e)
	}
	return all
}

// TestBook: what was changed is there, also after the file was read again, and a deletion is remembered.
func TestBook(t *testing.T) {
	name := filepath.Join(t.TempDir(), OverridesFile)
	b := mustOpen(t, name)
	expect.True(t, len(contentOf(b)) == 0 && b.Durable(), "an empty book")
	set(t, b, "n0", "alice", `{"limit":1}`)
	e := set(t, b, "n0", "alice", `{"limit":2}`)
	expect.Equal(t, e.Version, Version{2, "n0"}, "version")
	hostile := "new\nline \x00 \U0001F600 \u2028\"\\"
	set(t, b, "n0", hostile, `{"unlimited":true}`)
	set(t, b, "n0", "bob", `{"limit":3}`)
	now, before, err := change(b, "n0", Entry{ID: ID{Policy: "login", Key: "bob"}, At: epoch})
	expect.True(t, err == nil && now.Deleted() && before.Settings == `{"limit":3}`,
		"deletion: %+v %+v %v", now, before, err)
	for _, key := range []string{"bob", "nobody"} {
		now, before, err := change(b, "n0", Entry{ID: ID{Policy: "login", Key: key}})
		expect.True(t, now == nil && before == nil && err == nil, "deletion of nothing: %+v %+v %v", now, before, err)
	}
	_, ok := b.Get(ID{Policy: "login", Key: "bob"})
	expect.True(t, !ok, "bob is still there")
	st := b.Stats()
	expect.True(t, st.Overrides == 2 && st.Deleted == 1 && st.Durable && st.WritesFailed == 0, "%+v", st)
	again := mustOpen(t, name)
	diff := cmp.Diff(contentOf(b), contentOf(again))
	expect.True(t, diff == "" && b.Digest() == again.Digest() && again.Stats().Overrides == 2, "%v", diff)
	e = set(t, again, "n0", "carol", `{"limit":1}`)
	expect.Equal(t, e.Counter, 6, "the counter went on at")
	info, err := os.Stat(name)
	expect.True(t, err == nil && info.Mode().Perm() == 0o600, "%v %v", info.Mode(), err)
	left, _ := os.ReadDir(filepath.Dir(name))
	expect.Equal(t, len(left), 1, "left behind: %v", left)
}

// TestUnwritable: what could not be written is not there, neither now nor after another start, and other members'
// entries are in force and written later.
func TestUnwritable(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "data")
	d := must.Value(OpenDirectory(directory))(t)
	_, err := OpenDirectory(directory)
	expect.True(t, err != nil, "opened twice")
	garbage := filepath.Join(directory, ".overrides.json-123")
	must.NoError(t, os.WriteFile(garbage, nil, 0o600))
	must.NoError(t, d.Close())
	d = must.Value(OpenDirectory(directory))(t)
	defer d.Close()
	_, err = os.Stat(garbage)
	expect.True(t, err != nil, "what was left behind is there")
	name := filepath.Join(directory, OverridesFile)
	b := mustOpen(t, name)
	set(t, b, "n0", "alice", `{"limit":1}`)
	away := directory + "-away"
	must.NoError(t, os.Rename(directory, away))
	_, _, err = change(b, "n0", Entry{ID: ID{Policy: "login", Key: "bob"}, Settings: `{"limit":1}`, At: epoch})
	expect.True(t, err != nil, "a change was not refused")
	_, ok := b.Get(ID{Policy: "login", Key: "bob"})
	expect.True(t, !ok && b.Stats().Overrides == 1, "it is there all the same")
	other := mustOpen(t, "")
	e := set(t, other, "n1", "carol", `{"limit":1}`)
	changed, err := merge(b, []Entry{e})
	expect.True(t, changed && err == nil, "merge: %v", err)
	_, ok = b.Get(e.ID)
	expect.True(t, ok && !b.Durable() && b.Stats().WriteError != nil, "carol is not there, or said to be durable")
	err = b.Retry()
	expect.True(t, err != nil, "the file was written")
	must.NoError(t, os.Rename(away, directory))
	err = b.Retry()
	expect.True(t, err == nil && b.Durable(), "retry: %v", err)
	expect.NoDiff(t, cmp.Diff(contentOf(b), contentOf(mustOpen(t, name))))
	_, err = OpenDirectory(filepath.Join(name, "x"))
	expect.True(t, err != nil, "a directory in a file")
	expect.True(t, !other.Durable(), "a book without a file is durable")
}

// TestMergeConverges: members that learn of the same changes in any order, any number of times and in any pages have
// the same entries: the newest of each override, also where a member that lost its file has used a version twice.
func TestMergeConverges(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 200 {
		var changes []Entry
		newest := make(map[ID]Entry)
		for range 1 + rng.IntN(40) {
			e := Entry{
				ID:      ID{Policy: fmt.Sprint("p", rng.IntN(2)), Key: fmt.Sprint("k", rng.IntN(4))},
				Version: Version{1 + rng.Uint64N(4), fmt.Sprint("n", rng.IntN(3))}, By: fmt.Sprint(rng.IntN(2)),
				At: time.UnixMilli(rng.Int64N(3)).UTC(),
			}
			if rng.IntN(2) == 0 {
				e.ID.Key, e.ID.Prefix = "", e.ID.Key
			}
			if rng.IntN(3) > 0 {
				e.Settings = fmt.Sprintf(`{"limit":%d}`, 1+rng.IntN(3))
			}
			changes = append(changes, e)
			if was, ok := newest[e.ID]; !ok || e.newer(&was) {
				newest[e.ID] = e
			}
		}
		var first *Book
		for range 3 {
			b := mustOpen(t, "")
			order := slices.Concat(changes, changes[:rng.IntN(len(changes)+1)])
			rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
			for len(order) > 0 {
				n := 1 + rng.IntN(len(order))
				_, err := merge(b, order[:n])
				must.NoError(t, err)
				order = order[n:]
			}
			for _, e := range contentOf(b) {
				must.Equal(t, e, newest[e.ID], "round %d", round)
			}
			if first == nil {
				first = b
			}
			diff := cmp.Diff(contentOf(first), contentOf(b))
			must.True(t, diff == "" && first.Digest() == b.Digest() && len(contentOf(b)) == len(newest),
				"round %d: %s", round, diff)
		}
	}
}

// overridesOf are so many of a policy, each under a version of its own.
func overridesOf(policy string, n int) []Entry {
	entries := make([]Entry, n)
	for i := range entries {
		entries[i] = Entry{ID: ID{Policy: policy, Key: fmt.Sprint(i)}, Version: Version{uint64(i + 1), "n1"},
			Settings: `{"limit":1}`, At: epoch}
	}
	return entries
}

// TestBounds: a book takes no more than it may from operators, of a policy no more than it leaves free, and from
// members twice as much.
func TestBounds(t *testing.T) {
	b := mustOpen(t, "")
	entries := overridesOf("login", 2*MaxOverrides+5)
	_, err := merge(b, entries[:MaxOverrides/2])
	must.True(t, err == nil && b.Stats().Overrides == MaxOverrides/2, "%+v %v", b.Stats(), err)
	full := b.Digest()
	for _, id := range []ID{{Policy: "login", Key: "one more"}, {Policy: "login", Key: "7", Prefix: ""}} {
		e := Entry{ID: id, Settings: `{"limit":1}`, At: epoch}
		if id.Key == "7" {
			e.Settings = `{"x":"` + strings.Repeat("s", 4000) + `"}` // the bytes are free
		}
		_, _, err := change(b, "n0", e)
		expect.True(t, errors.Is(err, ErrFull) == (id.Key != "7") && (id.Key == "7" || b.Digest() == full),
			"%v: %v", id, err)
	}
	other := Entry{ID: ID{Policy: "api", Key: "k"}, Settings: `{"limit":1}`, At: epoch}
	_, _, err = change(b, "n0", other)
	expect.NoError(t, err, "a policy without any, beside one that has its part")
	if _, err := merge(b, entries); !errors.Is(err, ErrFull) || b.Stats().Overrides != 2*MaxOverrides {
		t.Errorf("%d overrides, %v", b.Stats().Overrides, err)
	}
	other.Key = "l"
	_, _, err = change(b, "n0", other)
	expect.ErrorIs(t, err, ErrFull, "beyond all")
	_, _, err = change(b, "n0", Entry{ID: ID{Policy: "login", Key: "8"}, At: epoch})
	expect.NoError(t, err, "a deletion")
	wide := mustOpen(t, "")
	for i := range entries[:5000] {
		entries[i].Settings = `{"x":"` + strings.Repeat("s", 4000) + `"}`
	}
	_, err = merge(wide, entries[:5000])
	expect.True(t, errors.Is(err, ErrFull) && wide.Stats().Bytes <= 2*MaxBytes && wide.Stats().Bytes >= 2*MaxBytes-8000,
		"%v with %+v", err, wide.Stats())
	_, _, err = change(wide, "n0", Entry{ID: other.ID, Settings: `{"limit":1}`, At: epoch})
	expect.ErrorIs(t, err, ErrFull, "beyond all bytes")
}

// TestOldDeletionsAreForgotten: of too many deletions the newest are remembered, the same ones on all members, whatever
// they were told first.
func TestOldDeletionsAreForgotten(t *testing.T) {
	const n = MaxDeleted + 5000
	entries := overridesOf("login", n)
	for i := range entries {
		entries[i].Settings = ""
	}
	b, reverse := mustOpen(t, ""), mustOpen(t, "")
	_, err := merge(b, entries)
	must.NoError(t, err)
	st := b.Stats()
	expect.Equal(t, st.Deleted, MaxDeleted, "%+v", st)
	oldest := uint64(n - b.Stats().Deleted + 1)
	for _, e := range contentOf(b) {
		must.True(t, e.Counter >= oldest, "the deletion %v is remembered, and newer ones are forgotten", e.Version)
	}
	slices.Reverse(entries)
	for page := range slices.Chunk(entries, 999) {
		_, err := merge(reverse, page)
		must.NoError(t, err)
	}
	expect.True(t, b.Digest() == reverse.Digest(), "%+v %+v", b.Stats(), reverse.Stats())
	long := strings.Repeat("k", 1000)
	for i := range entries[:5000] {
		entries[i].Key = long + fmt.Sprint(i)
	}
	if _, err := merge(b, entries[:5000]); err != nil || b.now.Load().deleted.bytes > MaxDeletedBytes {
		t.Errorf("%d bytes of deletions, %v", b.now.Load().deleted.bytes, err)
	}
}

// TestSizeOfAFile: no entry takes more of a file than it counts for, so that the largest book fits into a message and
// into maxFile.
func TestSizeOfAFile(t *testing.T) {
	all := string([]byte{0, 1, 9, 10, 31, 32, 34, 47, 92, 127}) + "<>&\u00e9\u2028\U0001F600"
	empty := must.Value(encode(nil))(t)
	for _, e := range []Entry{
		{ID: ID{Policy: "p", Key: all}, Version: Version{maxCounter, all}, Settings: `{"limit":1}`, By: all,
			At: time.UnixMilli(maxMillis).UTC()},
		{ID: ID{Policy: "p", Prefix: all}, Version: Version{1, "n"}, At: time.UnixMilli(maxMillis).UTC()},
	} {
		text, err := encode([]*Entry{&e})
		if size := len(text) - len(empty); err != nil || size+len(",") > e.bytes() {
			t.Errorf("%d bytes, and counts for %d, %v: %s", size, e.bytes(), err, text)
		}
	}
	expect.True(t, 2*MaxBytes+MaxDeletedBytes+1<<20 <= transport.MaxMessage,
		"the largest book does not fit into a message")
}

// TestInvalidEntries: what is not an entry is told from one, and the error names the field. Files and books of other
// members with one are rejected.
func TestInvalidEntries(t *testing.T) {
	good := Entry{ID: ID{Policy: "login", Key: "k"}, Version: Version{1, "n"}, Settings: `{"limit":1}`, At: epoch}
	for field, change := range map[string]func(*Entry){
		"policy":   func(e *Entry) { e.Policy = "a b" },
		"key":      func(e *Entry) { e.Key = "" },
		"prefix":   func(e *Entry) { e.Prefix = "x" },
		"counter":  func(e *Entry) { e.Counter = 0 },
		"node":     func(e *Entry) { e.Node = "" },
		"by":       func(e *Entry) { e.By = "\xff" },
		"settings": func(e *Entry) { e.Settings = strings.Repeat("x", 4097) },
		"at":       func(e *Entry) { e.At = time.UnixMilli(-1) },
	} {
		bad := good
		change(&bad)
		expect.ErrorContains(t, bad.valid(), field+": ", "%s", field)
	}
	for name, change := range map[string]func(*Entry){
		"key in Latin-1":    func(e *Entry) { e.Key = "\xe9" },
		"long key":          func(e *Entry) { e.Key = strings.Repeat("k", 1025) },
		"long prefix":       func(e *Entry) { e.Key, e.Prefix = "", strings.Repeat("k", 1025) },
		"counter at 2^63":   func(e *Entry) { e.Counter = 1 << 63 },
		"settings in bytes": func(e *Entry) { e.Settings = "\xff" },
		"year 10000":        func(e *Entry) { e.At = time.UnixMilli(maxMillis + 1) },
	} {
		bad := good
		change(&bad)
		expect.True(t, bad.valid() != nil, "%s", name)
	}
	good.Counter = maxCounter
	name := filepath.Join(t.TempDir(), "overrides.json")
	must.NoError(t, os.WriteFile(name, must.Value(encode([]*Entry{&good}))(t), 0o600))
	_, _, err := change(mustOpen(t, name), "n", Entry{ID: ID{Policy: "login", Key: "k"}, Settings: `{"limit":2}`})
	expect.True(t, err != nil, "the counter went on beyond its end")
}

// TestFarVersion: an entry of a member that lies about its version does not use up the counters of a book, an empty
// one's either, and so freeze all changes.
func TestFarVersion(t *testing.T) {
	for known := range uint64(2) {
		b := mustOpen(t, "")
		for range known {
			set(t, b, "n0", "alice", `{"limit":1}`)
		}
		far := Entry{ID: ID{Policy: "login", Key: "k"}, Version: Version{maxCounter, "n1"}, Settings: `{"limit":1}`,
			At: epoch}
		for _, far.Counter = range []uint64{maxCounter, known + maxStep + 1} {
			changed, err := merge(b, []Entry{far})
			expect.True(t, !changed && err != nil && strings.Contains(err.Error(), "counter: "),
				"counter %d after %d: %t, %v", far.Counter, known, changed, err)
		}
		far.Counter = known + maxStep
		changed, err := merge(b, []Entry{far})
		expect.True(t, changed && err == nil, "the largest step after %d: %v", known, err)
		e := set(t, b, "n0", "k", `{"limit":2}`)
		expect.Equal(t, e.Counter, known+maxStep+1, "a change after it: %+v", e)
	}
}

// TestFileErrors: a file that is not a book's is an error that names the file and the place, and nothing of it is
// taken.
func TestFileErrors(t *testing.T) {
	const entry = `{"policy":"p","key":"k","settings":{"limit":1},"counter":1,"node":"n","at":"2026-01-01T00:00:00Z"}`
	for name, c := range map[string]struct{ content, want string }{
		"empty":          {"", ":1:1: "},
		"cut off":        {"{\"format\": 1, \"overrides\": [\n" + entry + ",\n{\"policy\":\"p", ":3:"},
		"another format": {`{"format": 2, "overrides": []}`, "format: is 2"},
		"unknown field":  {`{"format": 1, "overrides": [], "x": 1}`, ":1:"},
		"zero bytes":     {strings.Repeat("\x00", 100), ":1:1: "},
		"twice": {"{\"format\": 1, \"overrides\": [\n" + entry + ",\n" + entry + "\n]}",
			": overrides[1]: key: "},
		"field twice": {"{\"format\": 1, \"overrides\": [\n{\"policy\":\"p\",\"policy\":\"p\"}\n]}", ":2:"},
		"bad policy": {"{\"format\": 1, \"overrides\": [\n" + strings.Replace(entry, `"p"`, `"p p"`, 1) + "\n]}",
			": overrides[0]: policy: "},
		"no object": {"{\"format\": 1, \"overrides\": [\n" + strings.Replace(entry, `{"limit":1}`, `7`, 1) +
			"\n]}", ": overrides[0]: settings: "},
		"neither": {"{\"format\": 1, \"overrides\": [\n" + strings.Replace(entry, `"settings":{"limit":1},`, ``,
			1) + "\n]}", ": overrides[0]: settings: "},
		"both": {"{\"format\": 1, \"overrides\": [\n" + strings.Replace(entry, `"counter"`,
			`"deleted":true,"counter"`, 1) + "\n]}", ": overrides[0]: settings: "},
		"counter of text": {"{\"format\": 1, \"overrides\": [\n" + strings.Replace(entry, `:1,"node"`, `:"1","node"`,
			1) + "\n]}", ":2:"},
	} {
		file := filepath.Join(t.TempDir(), OverridesFile)
		must.NoError(t, os.WriteFile(file, []byte(c.content), 0o600))
		_, err := OpenBook(file)
		expect.True(t, err != nil && strings.HasPrefix(err.Error(), file+":") && strings.Contains(err.Error(), c.want),
			"%s: %v, want %q", name, err, c.want)
	}
	_, err := OpenBook(t.TempDir())
	expect.True(t, err != nil, "a directory was read")
}

// FuzzFile: any content is read without a panic, and what is read is written and read again as the same.
func FuzzFile(f *testing.F) {
	f.Add([]byte("{\"format\": 1, \"overrides\": [\n{\"policy\":\"p\",\"key\":\"k\",\"settings\":{\"limit\":1},\"counter\":1,\"node\":\"n\",\"at\":\"2026-01-01T00:00:00Z\"},\n{\"policy\":\"p\",\"prefix\":\"k\",\"deleted\":true,\"counter\":2,\"node\":\"n\",\"at\":\"2026-01-01T00:00:00+01:00\"}\n]}"))
	f.Add([]byte(`{"format":1,"overrides":[{"policy":"p","key":"\ud83d\ude00","settings":{"\u0061" : 1e3},"counter":9007199254740992,"node":"n","at":"1970-01-01T00:00:00.0005Z"}]}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		entries, err := parse("f", content)
		if err != nil {
			return
		}
		list := func(entries []Entry) (all []*Entry) {
			for i := range entries {
				all = append(all, &entries[i])
			}
			return all
		}
		written := must.Value(encode(list(entries)))(t)
		again, err := parse("f", written)
		diff := cmp.Diff(entries, again)
		must.True(t, err == nil && (diff == "" || len(entries) == 0), "%v: %s", err, diff)
		twice, _ := encode(list(again))
		expect.Equal(t, string(twice), string(written), "%s\nthen\n%s", written, twice)
	})
}
