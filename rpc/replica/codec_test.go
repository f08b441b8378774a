package replica

import (
	"encoding/hex"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// coreMessages has one message of each type.
func coreMessages() []ownership.Message {
	return []ownership.Message{
		&ownership.Query{}, &ownership.QueryReply{}, &ownership.Entrust{}, &ownership.Offer{}, &ownership.OfferReply{},
		&ownership.Block{}, &ownership.BlockAck{}, &ownership.Commit{}, &ownership.CommitAck{}, &ownership.Forget{},
		&ownership.GrantRequest{}, &ownership.GrantReply{}, &ownership.ReadRecords{}, &ownership.Records{},
	}
}

// messageTypes returns the names of the types that package ownership declares to be messages.
func messageTypes(t *testing.T) []string {
	t.Helper()
	f := must.Value(parser.ParseFile(token.NewFileSet(), "../../cluster/ownership/message.go", nil, 0))(t)
	var names []string
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv != nil && fn.Name.Name == "message" {
			names = append(names, fn.Recv.List[0].Type.(*ast.StarExpr).X.(*ast.Ident).Name)
		}
	}
	return slices.Sorted(slices.Values(names))
}

func TestEveryMessageIsCarried(t *testing.T) {
	var have []string
	for _, m := range coreMessages() {
		have = append(have, reflect.TypeOf(m).Elem().Name())
	}
	slices.Sort(have)
	want := messageTypes(t)
	expect.True(t, slices.Equal(have, want), "these tests know %v, package ownership has %v", have, want)
	expect.Equal(t, len(kinds), len(want), "kinds")
}

const testPartitions = 7

// fillMessage sets every field of a message, at any depth, to something valid that is not its zero value; unless
// sparse, in which case it leaves some out. A field that a conversion forgets, also one that is yet to be added, comes
// back as zero.
func fillMessage(rng *rand.Rand, v reflect.Value, sparse bool) {
	switch to := v.Addr().Interface().(type) {
	case *time.Duration:
		*to = 1 + time.Duration(rng.Int64N(int64(maxWait)))
		return
	case *ownership.Verdict:
		*to = 1 + ownership.Verdict(rng.UintN(uint(ownership.Refused)))
		return
	case *ownership.Outcome:
		*to = 1 + ownership.Outcome(rng.UintN(uint(ownership.Conflict)))
		return
	case *ownership.Node:
		if !sparse || rng.IntN(3) > 0 {
			*to = ownership.Node{Name: strings.Repeat("n", 1+rng.IntN(ownership.MaxName)), Boot: rng.Uint64() | 1}
		}
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fillMessage(rng, v.Field(i), sparse)
		}
		return
	case reflect.Slice:
		n := 1 + rng.IntN(testPartitions)
		if sparse {
			n = rng.IntN(2)
		}
		if n == 0 {
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			fillMessage(rng, v.Index(i), sparse)
		}
		return
	}
	if sparse && rng.IntN(3) == 0 {
		return
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int:
		v.SetInt(1 + rng.Int64N(testPartitions-1))
	case reflect.Uint64, reflect.Uint32, reflect.Uint8:
		v.SetUint(1 + rng.Uint64N(math.MaxUint64>>(64-v.Type().Bits())))
	default:
		panic("a kind of field that these tests do not know: " + v.Type().String())
	}
}

// carryMessage returns what arrives of a message.
func carryMessage(t *testing.T, m ownership.Message) (got ownership.Message, length int) {
	t.Helper()
	data := Append(nil, m)
	got, err := Read(data, testPartitions)
	must.NoError(t, err, "%+v", m)
	return got, len(data)
}

func TestMessagesRoundTrip(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		for _, m := range coreMessages() {
			sparse := rng.IntN(2) == 0
			fillMessage(rng, reflect.ValueOf(m).Elem(), sparse)
			got, length := carryMessage(t, m)
			must.True(t, reflect.DeepEqual(got, m), "sent    %+v\narrived %+v", m, got)
			must.True(t, length <= ownership.Weight(m), "%T has %d bytes and a weight of %d", m, length,
				ownership.Weight(m))
		}
	}
}

// TestWeightIsEnough: a frame is filled by weight, and must not be larger than a peer takes.
func TestWeightIsEnough(t *testing.T) {
	long := ownership.Node{Name: strings.Repeat("n", ownership.MaxName), Boot: math.MaxUint64}
	high := ownership.Term{Epoch: math.MaxUint64, N: math.MaxUint64}
	const most = math.MaxInt32
	chunk := make([]byte, 1<<20)
	high2 := ownership.Term{Epoch: math.MaxUint64, N: math.MaxUint64 - 1}
	entry := ownership.Entry{Partition: most, Term: high, Attachment: math.MaxUint64, Begin: true, Complete: true,
		More: true, Chunk: make([]byte, 500)}
	other := entry
	other.Term = high2
	record := ownership.Record{Partition: most, Term: high, Node: long, Backup: long}
	for _, m := range []ownership.Message{
		&ownership.Query{ID: math.MaxUint64, Partitions: slices.Repeat([]int{most}, 1000)},
		&ownership.QueryReply{ID: math.MaxUint64, Infos: slices.Repeat([]ownership.Info{
			{Partition: most, Held: true, Claiming: true, Term: high, Holder: long,
				Copy: ownership.Position{Term: high, Attachment: math.MaxUint64}},
		}, 1000)},
		&ownership.Block{
			Log: math.MaxUint64, Position: math.MaxUint64, Heard: math.MaxUint64,
			Entries: slices.Repeat([]ownership.Entry{entry, other}, 500),
			Sum:     math.MaxUint32,
		},
		&ownership.BlockAck{Log: math.MaxUint64, Position: math.MaxUint64, Lost: true,
			Refusals: slices.Repeat([]ownership.Refusal{
				{Partition: most, Attachment: math.MaxUint64, Outcome: 255, Known: high, Holder: long},
			}, 1000)},
		&ownership.Commit{
			Partition: most, Term: high, Attachment: math.MaxUint64, Chunk: chunk, Sum: math.MaxUint32, Known: high,
			Merge: true, Granted: true,
		},
		&ownership.CommitAck{Partition: most, Term: high, Outcome: 255, New: high, Keep: true,
			Attachment: math.MaxUint64, Known: high},
		&ownership.GrantRequest{ID: math.MaxUint64, Items: slices.Repeat([]ownership.GrantItem{
			{Partition: most, Term: high, Backup: long, Release: ownership.Release{Node: long, Term: high}},
		}, 1000)},
		&ownership.GrantReply{ID: math.MaxUint64, Epoch: math.MaxUint64, Items: slices.Repeat([]ownership.GrantAnswer{
			{Partition: most, Term: high, Granted: true, Recorded: record, Wait: math.MaxInt64},
		}, 1000)},
		&ownership.Records{ID: math.MaxUint64, Read: true, Epoch: math.MaxUint64,
			Records: slices.Repeat([]ownership.Record{record}, 1000)},
	} {
		n := len(Append(nil, m))
		expect.True(t, n <= ownership.Weight(m), "%T has %d bytes and a weight of %d", m, n, ownership.Weight(m))
	}
}

func TestMessagesRefused(t *testing.T) {
	long, high := ownership.Node{Name: strings.Repeat("n", ownership.MaxName+1)}, ownership.Term{N: math.MaxUint64}
	good := Append(nil, &ownership.Block{Entries: []ownership.Entry{{Partition: 6, Term: high, Chunk: []byte("c")},
		{Begin: true}}})
	const outside = " is not one of 0 to 6"
	c := coder{reading: true, partitions: testPartitions}
	refused := func(want string, data []byte) {
		t.Helper()
		c.items = maxItems
		got, err := c.read(data)
		expect.True(t, err != nil && got == nil && strings.HasPrefix(fmt.Sprint(err), want), "want %q: got %+v, %v",
			want, got, err)
		_, err = c.read(good) // after a mistake
		expect.NoError(t, err, "after %q", want)
	}
	for _, test := range []struct {
		want string
		m    ownership.Message
	}{
		{"Query: partition: 7" + outside, &ownership.Query{Partitions: []int{6, 7}}},
		{"Query: partitions: 8 is not one of 0 to 7", &ownership.Query{Partitions: make([]int, 8)}},
		{"QueryReply: infos: 8", &ownership.QueryReply{Infos: make([]ownership.Info, 8)}},
		{"QueryReply: partition: 7" + outside, &ownership.QueryReply{Infos: []ownership.Info{{Partition: 7}}}},
		{"QueryReply: name: 64 is not one of 0 to 63", &ownership.QueryReply{Infos: []ownership.Info{{Holder: long}}}},
		{"Entrust: partition: 4294967295", &ownership.Entrust{Partition: math.MaxUint32}},
		{"Offer: partition: 7" + outside, &ownership.Offer{Partition: 7}},
		{"OfferReply: verdict: 0 is not one of 1 to 3", &ownership.OfferReply{}},
		{"OfferReply: verdict: 4", &ownership.OfferReply{Verdict: 4}},
		{"OfferReply: partition: 7", &ownership.OfferReply{Verdict: 1, Partition: 7}},
		{"Block: partition: 7", &ownership.Block{Entries: []ownership.Entry{{Partition: 7}}}},
		{"Block: entries: 32769 is not one of 0 to 32768",
			&ownership.Block{Entries: make([]ownership.Entry, maxEntries+1)}},
		{"BlockAck: partition: 7", &ownership.BlockAck{Refusals: []ownership.Refusal{{Partition: 7, Outcome: 2}}}},
		{"BlockAck: outcome: 6 is not one of 1 to 5", &ownership.BlockAck{Refusals: []ownership.Refusal{{Outcome: 6}}}},
		{"BlockAck: name", &ownership.BlockAck{Refusals: []ownership.Refusal{{Outcome: 2, Holder: long}}}},
		{"BlockAck: refusals: 32769", &ownership.BlockAck{Refusals: make([]ownership.Refusal, maxEntries+1)}},
		{"Commit: partition", &ownership.Commit{Partition: 7}},
		{"Commit: length: ", &ownership.Commit{Chunk: make([]byte, maxWeight+1)}},
		{"Forget: partition", &ownership.Forget{Partition: 7}},
		{"CommitAck: partition", &ownership.CommitAck{Partition: 7, Outcome: 1}},
		{"CommitAck: outcome: 0", &ownership.CommitAck{}},
		{"GrantRequest: items: 8", &ownership.GrantRequest{Items: make([]ownership.GrantItem, 8)}},
		{"GrantRequest: partition", &ownership.GrantRequest{Items: []ownership.GrantItem{{Partition: 7}}}},
		{"GrantRequest: name", &ownership.GrantRequest{Items: []ownership.GrantItem{{Backup: long}}}},
		{"GrantRequest: name", &ownership.GrantRequest{Items: []ownership.GrantItem{{Release: ownership.Release{Node: long}}}}},
		{"GrantReply: items: 8", &ownership.GrantReply{Items: make([]ownership.GrantAnswer, 8)}},
		{"GrantReply: partition", &ownership.GrantReply{Items: []ownership.GrantAnswer{{}, {Partition: 7}}}},
		{"GrantReply: wait: 3600000000001 is not",
			&ownership.GrantReply{Items: []ownership.GrantAnswer{{Wait: maxWait + 1}}}},
		{"GrantReply: wait: ", &ownership.GrantReply{Items: []ownership.GrantAnswer{{Wait: -1}}}},
		{"GrantReply: partition",
			&ownership.GrantReply{Items: []ownership.GrantAnswer{{Recorded: ownership.Record{Partition: 7}}}}},
		{"Records: records: 15 is not one of 0 to 14", &ownership.Records{Records: make([]ownership.Record, 15)}},
		{"Records: name", &ownership.Records{Records: []ownership.Record{{}, {Backup: long}}}},
	} {
		refused(test.want, Append(nil, test.m))
	}
	refused("Query: length", nil)
	refused("kind", []byte{byte(len(kinds))})
	refused("kind", Append(nil, nil))
	refused("Block: length", good[:len(good)-1])
	refused("Block: length", append(slices.Clone(good), 0))
	refused("Block: entries: 20 items are too many", append([]byte{5, 0, 0, 0, 0, 20}, make([]byte, 19)...))
	refused("Block: flags: 64 is not one of 0 to 63", []byte{5, 0, 0, 0, 0, 1, 64, 0, 0, 0})
	refused("Block: sum: 4294967296", []byte{5, 0, 0, 0, 0x80, 0x80, 0x80, 0x80, 0x10, 0})
}

// checkMessage fails when a message has something in it that could be a mistake of a reader: it walks all of it.
func checkMessage(t *testing.T, path string, v reflect.Value) {
	t.Helper()
	switch x := v.Interface().(type) {
	case ownership.Verdict:
		expect.True(t, x >= ownership.Accepted && x <= ownership.Refused, "%s: %v", path, x)
		return
	case ownership.Outcome:
		expect.True(t, x >= ownership.Done && x <= ownership.Full, "%s: %v", path, x)
		return
	case time.Duration:
		expect.True(t, x >= 0 && x <= maxWait, "%s: %v", path, x)
		return
	case []byte:
		return
	case []ownership.Entry:
		for i := range x {
			checkMessage(t, path+".Partition", reflect.ValueOf(x[i].Partition))
		}
		return
	case []ownership.Refusal:
		for i := range x {
			checkMessage(t, path, reflect.ValueOf(x[i]))
		}
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		checkMessage(t, path, v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			checkMessage(t, path+"."+v.Type().Field(i).Name, v.Field(i))
		}
	case reflect.Slice:
		expect.True(t, v.Len() <= testPartitions, "%s: %d items", path, v.Len())
		for i := range v.Len() {
			checkMessage(t, path, v.Index(i))
		}
	case reflect.Int: // a partition: there is no other
		expect.True(t, v.Int() >= 0 && v.Int() < testPartitions, "%s: %d", path, v.Int())
	case reflect.String:
		expect.True(t, v.Len() <= ownership.MaxName, "%s: %d bytes", path, v.Len())
	}
}

// FuzzMessage: whatever arrives is refused, or is a message within all bounds that arrives unchanged once more.
func FuzzMessage(f *testing.F) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, m := range coreMessages() {
		fillMessage(rng, reflect.ValueOf(m).Elem(), false)
		f.Add(Append(nil, m))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := Read(data, testPartitions)
		if err != nil {
			return
		}
		checkMessage(t, "message", reflect.ValueOf(m))
		again, _ := carryMessage(t, m)
		expect.True(t, reflect.DeepEqual(again, m), "sent    %+v\narrived %+v", m, again)
	})
}

// TestMostItems: the lists of one frame have a bound together.
func TestMostItems(t *testing.T) {
	half := Append(nil, &ownership.Query{Partitions: make([]int, maxItems/2)})
	c := coder{reading: true, partitions: maxItems, items: maxItems}
	for i, ok := range []bool{true, true, false} {
		_, err := c.read(half)
		expect.Equal(t, err == nil, ok, "list %d: %v", i, err)
	}
}

// TestBlockBytes: the format of a block.
func TestBlockBytes(t *testing.T) {
	held, raised := ownership.Term{N: 1<<16 | 0xabcd}, ownership.Term{Epoch: 2, N: 2<<16 | 0xabcd}
	list := []ownership.Entry{
		{Partition: 3, Term: held, Attachment: 1<<63 | 7, Chunk: []byte("ch")},
		{Partition: 4, Term: held, Attachment: 300, Begin: true, More: true, Chunk: []byte("unk")},
		{Partition: 5, Term: raised, Attachment: 1<<63 | 1, Complete: true},
	}
	want := "05" + "010200" + "07" + "03" +
		"0003" + "00cdd706" + "0f" + "026368" + "0b04" + "d804" + "03756e6b" + "0405" + "02cdd70a" + "03" + "00"
	data := Append(nil, &ownership.Block{Log: 1, Position: 2, Sum: 7, Entries: list})
	expect.Equal(t, hex.EncodeToString(data), want, "bytes")
	got := must.Value(Read(data, testPartitions))(t)
	expect.True(t, reflect.DeepEqual(got.(*ownership.Block).Entries, list), "%+v", got)
}
