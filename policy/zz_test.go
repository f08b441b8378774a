package policy
import ("testing";"strings";"fmt")
func BenchmarkParseZ(b *testing.B){
 var t strings.Builder; t.WriteString("policies:\n  - name: a\n    algorithm: sliding_log\n    limit: 5\n    window: 1m\n    overrides:\n"); for i:=range 100000 { fmt.Fprintf(&t,"      - {key: user-%d, limit: 50}\n",i)}
 d:=[]byte(t.String())
 b.Run("yaml",func(b *testing.B){ b.ReportAllocs(); for b.Loop(){decodeYAML(d)}})
 b.Run("parse",func(b *testing.B){ b.ReportAllocs(); for b.Loop(){if _,err:=Parse("f",d);err!=nil{b.Fatal(err)}}})
}
