package replica

import (
	"encoding/binary"
	"encoding/hex"
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

	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
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
	var known []string
	bodies := (&peerv1.Message{}).ProtoReflect().Descriptor().Oneofs().ByName("body").Fields()
	for i := range bodies.Len() {
		known = append(known, string(bodies.Get(i).Message().Name()))
	}
	if slices.Sort(known); !slices.Equal(have, known) {
		t.Errorf("ownership.proto has %v, package ownership %v", known, have)
	}
}

const testPartitions = 7

// fillMessage sets every field of a message, at any depth, to something valid that is not its zero value; unless
// sparse, in which case it leaves some out. A field that a conversion forgets, also one that is yet to be added, comes back as
// zero.
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
	data, err := proto.Marshal(protoMessage(m))
	must.NoError(t, err)
	var p peerv1.Message
	must.NoError(t, proto.Unmarshal(data, &p))
	r := messageReader{partitions: testPartitions}
	got, err = r.read(&p)
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
			if length > ownership.Weight(m) {
				t.Fatalf("%T has %d bytes and a weight of %d", m, length, ownership.Weight(m))
			}
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
	entry := ownership.Entry{Partition: most, Term: high, Attachment: math.MaxUint64, Begin: true, Complete: true, More: true, Chunk: make([]byte, 500)}
	other := entry
	other.Term = high2
	record := ownership.Record{Partition: most, Term: high, Node: long, Backup: long}
	for _, m := range []ownership.Message{
		&ownership.Query{ID: math.MaxUint64, Partitions: slices.Repeat([]int{most}, 1000)},
		&ownership.QueryReply{ID: math.MaxUint64, Infos: slices.Repeat([]ownership.Info{
			{Partition: most, Held: true, Claiming: true, Term: high, Holder: long, Copy: ownership.Position{Term: high, Attachment: math.MaxUint64}},
		}, 1000)},
		&ownership.Block{
			Log: math.MaxUint64, Position: math.MaxUint64, Heard: math.MaxUint64, Entries: slices.Repeat([]ownership.Entry{entry, other}, 500),
			Sum: math.MaxUint32,
		},
		&ownership.BlockAck{Log: math.MaxUint64, Position: math.MaxUint64, Lost: true, Refusals: slices.Repeat([]ownership.Refusal{
			{Partition: most, Attachment: math.MaxUint64, Outcome: 255, Known: high, Holder: long},
		}, 1000)},
		&ownership.Commit{
			Partition: most, Term: high, Attachment: math.MaxUint64, Chunk: chunk, Sum: math.MaxUint32, Known: high, Release: long,
			Merge: true, Granted: true,
		},
		&ownership.CommitAck{Partition: most, Term: high, Outcome: 255, New: high, Keep: true, Attachment: math.MaxUint64, Known: high, Holder: long},
		&ownership.GrantRequest{ID: math.MaxUint64, Items: slices.Repeat([]ownership.GrantItem{
			{Partition: most, Term: high, Backup: long, Release: ownership.Release{Node: long, Term: high}},
		}, 1000)},
		&ownership.GrantReply{ID: math.MaxUint64, Epoch: math.MaxUint64, Items: slices.Repeat([]ownership.GrantAnswer{
			{Partition: most, Term: high, Granted: true, Recorded: record, Wait: math.MaxInt64},
		}, 1000)},
		&ownership.Records{ID: math.MaxUint64, Read: true, Epoch: math.MaxUint64, Records: slices.Repeat([]ownership.Record{record}, 1000)},
	} {
		if n := proto.Size(protoMessage(m)); n > ownership.Weight(m) {
			t.Errorf("%T has %d bytes and a weight of %d", m, n, ownership.Weight(m))
		}
	}
}

func TestMessagesRefused(t *testing.T) {
	block := func(entries []byte) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_Block{Block: &peerv1.Block{Entries: entries}}}
	}
	good := appendEntries(nil, []ownership.Entry{{Partition: 6, Term: ownership.Term{N: 1}, Chunk: []byte("c")}, {Begin: true}})
	acks := func(f *peerv1.Refusal) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_BlockAck{BlockAck: &peerv1.BlockAck{Refusals: []*peerv1.Refusal{f}}}}
	}
	grants := func(a *peerv1.GrantAnswer) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_GrantReply{GrantReply: &peerv1.GrantReply{Items: []*peerv1.GrantAnswer{{}, a}}}}
	}
	asks := func(i *peerv1.GrantItem) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_GrantRequest{GrantRequest: &peerv1.GrantRequest{Items: []*peerv1.GrantItem{i}}}}
	}
	records := func(r ...*peerv1.Record) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_Records{Records: &peerv1.Records{Records: r}}}
	}
	infos := func(i ...*peerv1.Info) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_QueryReply{QueryReply: &peerv1.QueryReply{Infos: i}}}
	}
	long := &peerv1.Node{Name: strings.Repeat("n", ownership.MaxName+1)}
	nameless := &peerv1.Node{Boot: 1}
	for want, m := range map[string]*peerv1.Message{
		"body": {},
		"query.partitions: 7 is not one of 7 partitions":  {Body: &peerv1.Message_Query{Query: &peerv1.Query{Partitions: []uint32{6, 7}}}},
		"query.partitions: 8 items":                       {Body: &peerv1.Message_Query{Query: &peerv1.Query{Partitions: make([]uint32, 8)}}},
		"query_reply.infos: 8 items":                      infos(make([]*peerv1.Info, 8)...),
		"info.partition":                                  infos(&peerv1.Info{Partition: 7}),
		"info.holder":                                     infos(&peerv1.Info{Holder: nameless}),
		"entrust.partition":                               {Body: &peerv1.Message_Entrust{Entrust: &peerv1.Entrust{Partition: math.MaxUint32}}},
		"offer.partition":                                 {Body: &peerv1.Message_Offer{Offer: &peerv1.Offer{Partition: 7}}},
		"offer_reply.verdict: 0":                          {Body: &peerv1.Message_OfferReply{OfferReply: &peerv1.OfferReply{}}},
		"offer_reply.verdict: 4":                          {Body: &peerv1.Message_OfferReply{OfferReply: &peerv1.OfferReply{Verdict: 4}}},
		"offer_reply.verdict: 257":                        {Body: &peerv1.Message_OfferReply{OfferReply: &peerv1.OfferReply{Verdict: 257}}},
		"offer_reply.partition":                           {Body: &peerv1.Message_OfferReply{OfferReply: &peerv1.OfferReply{Verdict: 1, Partition: 7}}},
		"block.partition: 7 is not one of 7":              block(appendEntries(nil, []ownership.Entry{{Partition: 7}})),
		"block.entries: are too many, or too few bytes":   block(nil),
		"block.entries: are too many, or too few bytes ":  block(append(binary.AppendUvarint(nil, maxEntries+1), make([]byte, 1<<20)...)),
		"block.entries: are too many, or too few bytes  ": block(append([]byte{4}, make([]byte, 15)...)),
		"block.entries: are malformed":                    block(good[:len(good)-1]),
		"block.entries: are malformed ":                   block(append(slices.Clone(good), 0)),
		"block.entries: are malformed  ":                  block([]byte{1, entryFlags + 1, 0, 0, 0}),
		"block.entries: are malformed   ":                 block([]byte{1, entryTerm, 0, 0x80, 0x80}),
		"block.entries: are malformed    ":                block([]byte{1, 0, 0, 0, 5, 1}),
		"refusal.partition":                               acks(&peerv1.Refusal{Partition: 7, Outcome: 2}),
		"refusal.outcome: 6":                              acks(&peerv1.Refusal{Outcome: 6}),
		"refusal.outcome: -1":                             acks(&peerv1.Refusal{Outcome: -1}),
		"refusal.holder":                                  acks(&peerv1.Refusal{Outcome: 2, Holder: long}),
		"block_ack.refusals: 32769 items":                 {Body: &peerv1.Message_BlockAck{BlockAck: &peerv1.BlockAck{Refusals: make([]*peerv1.Refusal, maxEntries+1)}}},
		"commit.partition":                                {Body: &peerv1.Message_Commit{Commit: &peerv1.Commit{Partition: 7}}},
		"commit.chunk: holds 2097153 bytes":               {Body: &peerv1.Message_Commit{Commit: &peerv1.Commit{Chunk: make([]byte, maxWeight+1)}}},
		"commit.release":                                  {Body: &peerv1.Message_Commit{Commit: &peerv1.Commit{Release: long}}},
		"forget.partition":                                {Body: &peerv1.Message_Forget{Forget: &peerv1.Forget{Partition: 7}}},
		"commit_ack.partition":                            {Body: &peerv1.Message_CommitAck{CommitAck: &peerv1.CommitAck{Partition: 7, Outcome: 1}}},
		"commit_ack.outcome: 0":                           {Body: &peerv1.Message_CommitAck{CommitAck: &peerv1.CommitAck{}}},
		"commit_ack.holder":                               {Body: &peerv1.Message_CommitAck{CommitAck: &peerv1.CommitAck{Outcome: 1, Holder: nameless}}},
		"grant_request.items: 8 items":                    {Body: &peerv1.Message_GrantRequest{GrantRequest: &peerv1.GrantRequest{Items: make([]*peerv1.GrantItem, 8)}}},
		"grant_item.partition":                            asks(&peerv1.GrantItem{Partition: 7}),
		"grant_item.backup":                               asks(&peerv1.GrantItem{Backup: nameless}),
		"grant_item.release.node":                         asks(&peerv1.GrantItem{Release: &peerv1.Release{Node: long}}),
		"grant_reply.items: 8 items":                      {Body: &peerv1.Message_GrantReply{GrantReply: &peerv1.GrantReply{Items: make([]*peerv1.GrantAnswer, 8)}}},
		"grant_answer.partition":                          grants(&peerv1.GrantAnswer{Partition: 7}),
		"grant_answer.wait_ns: 1h0m0.000000001s is more":  grants(&peerv1.GrantAnswer{WaitNs: uint64(maxWait) + 1}),
		"grant_answer.wait_ns: 2562047h47m16.854775807s":  grants(&peerv1.GrantAnswer{WaitNs: math.MaxUint64}),
		"record.partition":                                grants(&peerv1.GrantAnswer{Recorded: &peerv1.Record{Partition: 7}}),
		"records.records: 15 items":                       records(make([]*peerv1.Record, 15)...),
		"record.node":                                     records(&peerv1.Record{Node: long}),
		"record.backup":                                   records(&peerv1.Record{}, &peerv1.Record{Backup: nameless}),
	} {
		r := messageReader{partitions: testPartitions}
		got, err := r.read(m)
		expect.True(t, err != nil && got == nil && strings.HasPrefix(err.Error(), strings.TrimSpace(want)),
			"want %q: got %+v, %v", want, got, err)
		// A reader is used again after a mistake.
		_, err = r.read(block(good))
		expect.NoError(t, err, "after %q", want)
	}
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
		if v.Int() < 0 || v.Int() >= testPartitions {
			t.Errorf("%s: %d", path, v.Int())
		}
	case reflect.String:
		expect.True(t, v.Len() <= ownership.MaxName, "%s: %d bytes", path, v.Len())
	}
}

// FuzzMessage: whatever arrives is refused, or is a message within all bounds that arrives unchanged once more.
func FuzzMessage(f *testing.F) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, m := range coreMessages() {
		fillMessage(rng, reflect.ValueOf(m).Elem(), false)
		data := must.Value(proto.Marshal(protoMessage(m)))(f)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var p peerv1.Message
		if err := proto.Unmarshal(data, &p); err != nil {
			return
		}
		r := messageReader{partitions: testPartitions}
		m, err := r.read(&p)
		if err != nil {
			return
		}
		checkMessage(t, "message", reflect.ValueOf(m))
		again, _ := carryMessage(t, m)
		expect.True(t, reflect.DeepEqual(again, m), "sent    %+v\narrived %+v", m, again)
	})
}

// TestMostRecords: a voter tells of every partition two records, and any outcome is told.
func TestMostRecords(t *testing.T) {
	r := messageReader{partitions: 7}
	for n, ok := range map[int]bool{14: true, 15: false} {
		_, err := r.read(protoMessage(&ownership.Records{Records: make([]ownership.Record, n)}))
		expect.Equal(t, (err == nil), ok, "%d records of 7 partitions: %v", n, err)
	}
	for o := ownership.Done; o <= ownership.Full; o++ {
		_, err := r.read(protoMessage(&ownership.CommitAck{Outcome: o}))
		expect.NoError(t, err, "outcome %d", o)
	}
}

// TestBlockBytes: the format of a block's entries.
func TestBlockBytes(t *testing.T) {
	held, raised := ownership.Term{N: 1<<16 | 0xabcd}, ownership.Term{Epoch: 2, N: 2<<16 | 0xabcd}
	list := []ownership.Entry{
		{Partition: 3, Term: held, Attachment: 1<<63 | 7, Chunk: []byte("ch")},
		{Partition: 4, Term: held, Attachment: 300, Begin: true, More: true, Chunk: []byte("unk")},
		{Partition: 5, Term: raised, Attachment: 1<<63 | 1, Complete: true},
	}
	want := "03" + "0103" + "00cdd706" + "0f" + "026368" + "0a04" + "d804" + "03756e6b" + "0505" + "02cdd70a" + "03" + "00"
	data := appendEntries(nil, list)
	got := hex.EncodeToString(data)
	expect.True(t, got == want, "got  %s\nwant %s", got, want)
	r := messageReader{partitions: testPartitions}
	if got := r.entries(data); r.err != nil || !reflect.DeepEqual(got, list) {
		t.Errorf("%+v, %v", got, r.err)
	}
}

// BenchmarkBlock is a block of 1000 entries, from a message to bytes and back.
func BenchmarkBlock(b *testing.B) {
	const entries = 1000
	block := &ownership.Block{Log: 1, Position: 1}
	for i := range entries {
		term := ownership.Term{N: uint64(1+i/100)<<16 | 0xabcd}
		block.Entries = append(block.Entries, ownership.Entry{Partition: i % testPartitions, Term: term, Attachment: 1<<63 | 1, Chunk: make([]byte, 80)})
	}
	var data []byte
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if data, err = AppendFrame(data[:0], []ownership.Message{block}); err != nil {
			b.Fatal(err)
		}
		if _, err := ReadFrame(data, testPartitions); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/entries, "ns/entry")
	b.ReportMetric(float64(len(data))/entries, "bytes/entry")
}
